"""The checks `jax` and `cache`: whether JAX starts on what is here, and keeps the programs that it compiles."""

from __future__ import annotations

from collections import Counter

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.jax_subprocess import Start
from maxlm.diagnostics.result import CheckResult, failure, ok, skipped, warning
from maxlm.hardware.detect import Hardware

# A process with many GPUs takes some ten seconds.
SLOW_SECONDS = 60.0


def check_jax(case: CheckContext) -> CheckResult:
    """Starts JAX in a process of its own."""
    return evaluate_jax(case.start, case.hardware)


def evaluate_jax(start: Start, hardware: Hardware) -> CheckResult:
    """The finding of how JAX starts on some hardware."""
    if start.trouble:
        remedy = 'see packages and driver; try: python -c "import jax; print(jax.devices())"'
        if 'Unknown flag' in start.trouble:
            remedy = 'take those flags out of XLA_FLAGS (a TPU has its own in LIBTPU_INIT_ARGS)'
        return failure(f'does not start: {start.trouble}', remedy)
    told = ', '.join(f'{count} × {kind}' for kind, count in Counter(start.kinds).items())
    if start.platform != hardware.platform and hardware.platform != 'cpu':
        extras = "'maxlm[tpu]'" if hardware.platform == 'tpu' else "'maxlm[cuda12]' or 'maxlm[cuda13]'"
        return failure(
            f'runs on {start.platform} ({told}), and here are {hardware.told}',
            f'see driver and environment; pip install {extras}',
        )
    if start.platform == 'gpu' and hardware.nvidia and len(start.kinds) < len(hardware.nvidia.gpus):
        return warning(
            f'sees {told} of {len(hardware.nvidia.gpus)} GPUs', 'unset CUDA_VISIBLE_DEVICES, unless that is meant'
        )
    if start.seconds > SLOW_SECONDS:
        remedy = 'see what it waits for: JAX_LOGGING_LEVEL=DEBUG'
        if start.platform == 'cpu':
            remedy = 'JAX_PLATFORMS=cpu, or pip uninstall libtpu: it asks the cloud for a TPU that is not here'
        return warning(f'starts on {start.platform}: {told}, after {start.seconds:.0f} s', remedy)
    return ok(f'starts on {start.platform}: {told}, in {start.seconds:.1f} s')


def check_cache(case: CheckContext) -> CheckResult:
    """Whether compiled programs are kept, so that a run that starts again does not compile again."""
    wanted = case.config.train.compilation_cache_dir if case.config else True
    return evaluate_cache(case.start, bool(wanted), case.environment.get('JAX_COMPILATION_CACHE_DIR'))


def evaluate_cache(start: Start, wanted: bool, variable: str | None) -> CheckResult:
    """The finding of how programs are kept.

    Args:
        start: of JAX.
        wanted: whether train.compilation_cache_dir names a directory.
        variable: JAX_COMPILATION_CACHE_DIR; None = not set.
    """
    if start.trouble:
        return skipped(f'not tried: {start.trouble}')
    if start.complaint:
        return warning(start.complaint, 'see train.compilation_cache_dir: without it every start compiles again')
    if variable is not None:
        return ok(f'as JAX_COMPILATION_CACHE_DIR says: {start.programs or "not kept"}')
    if not wanted:
        return ok("not kept: train.compilation_cache_dir=''")
    return ok(f'kept in {start.programs}')
