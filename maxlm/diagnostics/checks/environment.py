"""Check `environment`: variables that silently make a run slow, small or wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, warning
from maxlm.errors import InputError
from maxlm.hardware.detect import Hardware

FRACTION = 'XLA_PYTHON_CLIENT_MEM_FRACTION'
# Default of launch/gpu_node.sh, and bounds: above them kernels and collectives lack memory, below them the model.
DEFAULT_FRACTION, MAX_FRACTION, MIN_FRACTION = 0.92, 0.95, 0.7
# CUDA libraries that JAX's plugins bundle. Libraries of the same names in LD_LIBRARY_PATH are loaded instead.
CUDA_LIBRARIES = ('libcublas.so*', 'libcudart.so*', 'libcudnn.so*', 'libcusparse.so*', 'libnccl.so*')


class RiskyVariable(NamedTuple):
    """A value of a variable that is a mistake on some hardware.

    Attributes:
        variable: name of the variable.
        is_bad: returns True for such a value.
        platform: platform on which it is a mistake; '': all.
        is_failure: whether it is a failure instead of a warning.
        effect: effect of the value, for the message.
    """

    variable: str
    is_bad: Callable[[str], bool]
    platform: str
    is_failure: bool
    effect: str


def _is_on(value: str) -> bool:
    return value.lower() in ('1', 'true', 'yes', 'on')


def _is_off(value: str) -> bool:
    return value.lower() in ('0', 'false', 'no', 'off')


RISKY_VARIABLES = (
    RiskyVariable(
        'CUDA_VISIBLE_DEVICES', lambda v: v.strip() in ('', '-1', 'NoDevFiles'), 'gpu', True, 'hides all GPUs'
    ),
    RiskyVariable(
        'XLA_PYTHON_CLIENT_ALLOCATOR', lambda v: v == 'platform', 'gpu', False, 'makes every allocation slow'
    ),
    RiskyVariable('XLA_PYTHON_CLIENT_PREALLOCATE', _is_off, 'gpu', False, 'causes memory fragmentation'),
    RiskyVariable('NCCL_P2P_DISABLE', _is_on, 'gpu', False, 'routes transfers between GPUs through the host'),
    RiskyVariable('NCCL_SHM_DISABLE', _is_on, 'gpu', False, 'routes transfers between GPUs of a node over the network'),
    RiskyVariable('NCCL_IB_DISABLE', _is_on, 'gpu', False, 'disables InfiniBand between nodes'),
    RiskyVariable('CUDA_LAUNCH_BLOCKING', _is_on, 'gpu', False, 'synchronizes after every kernel'),
    RiskyVariable('JAX_DISABLE_JIT', _is_on, '', True, 'disables compilation'),
    RiskyVariable('JAX_ENABLE_X64', _is_on, '', False, 'makes 64-bit types the default'),
    RiskyVariable('JAX_DEBUG_NANS', _is_on, '', False, 'synchronizes after every step'),
    RiskyVariable('JAX_LOG_COMPILES', _is_on, '', False, 'fills the log'),
)


def check_environment(context: CheckContext) -> CheckResult:
    """Checks for environment variables that break or slow down a run."""
    return evaluate_environment(context.environment, context.hardware)


def evaluate_environment(environment: Mapping[str, str], hardware: Hardware) -> CheckResult:
    """Evaluates environment variables for the given hardware."""
    platform = hardware.platform
    findings = [*_platforms(environment, hardware), *_process_variables(environment)]
    for risky in RISKY_VARIABLES:
        value = environment.get(risky.variable)
        if value is not None and risky.platform in ('', platform) and risky.is_bad(value):
            make_result = failure if risky.is_failure else warning
            findings.append(make_result(f'{risky.variable}={value} {risky.effect}', f'unset {risky.variable}'))
    if platform == 'gpu':
        findings += [*_fraction(environment), *_libraries(environment)]
    if not findings:
        names = ('JAX_', 'XLA_', 'CUDA_', 'NCCL_', 'MAXLM_', 'LIBTPU_')
        # Print only names, because values may be secrets.
        names_set = sorted(name for name in environment if name.startswith(names))
        findings.append(
            ok(f'no problem with {", ".join(names_set)}' if names_set else 'no JAX or CUDA variables are set')
        )
    return combine(findings)


def _platforms(environment: Mapping[str, str], hardware: Hardware) -> list[CheckResult]:
    platforms = environment.get('JAX_PLATFORMS', '')
    expected = {'gpu': {'gpu', 'cuda'}, 'tpu': {'tpu'}}.get(hardware.platform)
    if not platforms or expected is None or expected & set(platforms.split(',')):
        return []
    return [failure(f'JAX_PLATFORMS={platforms}, but this machine has {hardware.description}', 'unset JAX_PLATFORMS')]


def _process_variables(environment: Mapping[str, str]) -> list[CheckResult]:
    """Checks the variables of a multi-process run."""
    from maxlm.runtime.initialize import detect_process_env

    try:
        detect_process_env(environment)
    except InputError as error:
        return [failure(str(error), 'set all variables that launch/gpu_node.sh sets, or none')]
    return []


def _fraction(environment: Mapping[str, str]) -> list[CheckResult]:
    value = environment.get(FRACTION, environment.get('XLA_CLIENT_MEM_FRACTION'))
    if value is None:
        return []
    try:
        fraction = float(value)
    except ValueError:
        fraction = 0.0
    remedy = f'set {FRACTION}={DEFAULT_FRACTION}, or unset it'
    if not 0 < fraction <= 1:
        return [failure(f'{FRACTION}={value}: must be a fraction of the memory, above 0 and at most 1', remedy)]
    if fraction > MAX_FRACTION:
        return [warning(f'{FRACTION}={value} leaves too little for kernels and collectives', remedy)]
    if fraction < MIN_FRACTION:
        return [warning(f'{FRACTION}={value} leaves {1 - fraction:.0%} of each GPU unused', remedy)]
    return []


def _libraries(environment: Mapping[str, str]) -> list[CheckResult]:
    for directory in filter(None, environment.get('LD_LIBRARY_PATH', '').split(os.pathsep)):
        found = [path.name for pattern in CUDA_LIBRARIES for path in sorted(Path(directory).glob(pattern))]
        if found:
            return [
                warning(
                    f"LD_LIBRARY_PATH contains {directory}, whose {found[0]} is loaded instead of JAX's own",
                    'unset LD_LIBRARY_PATH',
                )
            ]
    return []
