"""Checks `jax` and `cache`: JAX starts on this hardware and caches compiled programs."""

from __future__ import annotations

from collections import Counter

from maxlm.diagnostics.checks.drivers import recommended_extra
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.jax_subprocess import JaxStart
from maxlm.diagnostics.result import CheckResult, failure, ok, skipped, warning
from maxlm.hardware.detect import Hardware
from maxlm.installation import pip_install

# A process with many GPUs takes about ten seconds.
SLOW_SECONDS = 60.0


def check_jax(context: CheckContext) -> CheckResult:
    """Starts JAX in a subprocess."""
    return evaluate_jax(context.jax_start, context.hardware)


def evaluate_jax(jax_start: JaxStart, hardware: Hardware) -> CheckResult:
    """Evaluates the start of JAX on the given hardware."""
    if jax_start.error:
        remedy = 'see packages and driver; run: python -c "import jax; print(jax.devices())"'
        if 'Unknown flag' in jax_start.error:
            remedy = 'remove these flags from XLA_FLAGS (TPU flags belong in LIBTPU_INIT_ARGS)'
        return failure(f'does not start: {jax_start.error}', remedy)
    device_counts = ', '.join(f'{count} × {kind}' for kind, count in Counter(jax_start.kinds).items())
    if jax_start.platform != hardware.platform and hardware.platform != 'cpu':
        extra = 'tpu' if hardware.platform == 'tpu' else recommended_extra(hardware.nvidia)
        return failure(
            f'runs on {jax_start.platform} ({device_counts}), but this machine has {hardware.description}',
            f'see driver and environment; {pip_install(extra)}',
        )
    if jax_start.platform == 'gpu' and hardware.nvidia and len(jax_start.kinds) < len(hardware.nvidia.gpus):
        return warning(
            f'sees {device_counts} of {len(hardware.nvidia.gpus)} GPUs',
            'unset CUDA_VISIBLE_DEVICES, unless this is intended',
        )
    if jax_start.seconds > SLOW_SECONDS:
        remedy = 'find out why it waits: JAX_LOGGING_LEVEL=DEBUG'
        if jax_start.platform == 'cpu':
            remedy = (
                'set JAX_PLATFORMS=cpu, or pip uninstall libtpu: it queries the cloud for a TPU that does not exist'
            )
        return warning(f'starts on {jax_start.platform}: {device_counts}, after {jax_start.seconds:.0f} s', remedy)
    return ok(f'starts on {jax_start.platform}: {device_counts}, in {jax_start.seconds:.1f} s')


def check_cache(context: CheckContext) -> CheckResult:
    """Checks that the compilation cache is enabled, so that a restart does not compile again."""
    is_enabled = context.config.train.compilation_cache_dir if context.config else True
    return evaluate_cache(context.jax_start, bool(is_enabled), context.environment.get('JAX_COMPILATION_CACHE_DIR'))


def evaluate_cache(jax_start: JaxStart, is_configured: bool, variable: str | None) -> CheckResult:
    """Evaluates the compilation cache.

    Args:
        jax_start: result of starting JAX.
        is_configured: whether train.compilation_cache_dir names a directory.
        variable: JAX_COMPILATION_CACHE_DIR; None: not set.
    """
    if jax_start.error:
        return skipped(f'not run: {jax_start.error}')
    if jax_start.cache_warning:
        return warning(
            jax_start.cache_warning, 'see train.compilation_cache_dir: without the cache, every start compiles again'
        )
    if variable is not None:
        return ok(f'by JAX_COMPILATION_CACHE_DIR: {jax_start.cache_dir or "not kept"}')
    if not is_configured:
        return ok("not kept: train.compilation_cache_dir=''")
    return ok(f'kept in {jax_start.cache_dir}')
