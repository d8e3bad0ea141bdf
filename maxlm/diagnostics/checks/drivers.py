"""Checks `driver` and `gpus`: the accelerators' driver matches JAX, and they are healthy and unused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections import Counter
from collections.abc import Callable

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, skipped, warning
from maxlm.formatting import GIB, format_bytes
from maxlm.hardware.detect import Hardware
from maxlm.hardware.nvml import Gpu, Nvidia
from maxlm.installation import pip_install

# Extra → package that contains JAX's plugin.
CUDA_PLUGINS = {'cuda12': 'jax-cuda12-plugin', 'cuda13': 'jax-cuda13-plugin'}
# Extra → oldest supported driver on Linux: https://docs.jax.dev/en/latest/installation.html and, for the exact version
# of cuda13, NVIDIA's release notes of CUDA 13.0.
OLDEST_DRIVERS = {'cuda12': (525, 60, 13), 'cuda13': (580, 65, 6)}
# Memory that the driver itself uses on an idle GPU.
IDLE_BYTES = 1.5 * GIB


def recommended_extra(nvidia: Nvidia | None) -> str:
    """Returns the newest extra that a driver supports; cuda12 if that is unknown."""
    supported = [extra for extra, oldest in OLDEST_DRIVERS.items() if nvidia and nvidia.driver >= oldest]
    return supported[-1] if supported else 'cuda12'


def check_driver(context: CheckContext) -> CheckResult:
    """Checks that the driver responds and that JAX has the matching plugin."""
    return evaluate_driver(context.hardware, _is_installed)


def evaluate_driver(hardware: Hardware, is_installed: Callable[[str], bool]) -> CheckResult:
    """Evaluates the accelerators and their driver. `is_installed` takes the name of a package."""
    if hardware.platform == 'cpu':
        return ok('no GPU or TPU found: JAX runs on the CPU')
    if hardware.platform == 'tpu':
        if is_installed('libtpu'):
            return ok(f'{hardware.description}, and libtpu is installed')
        return failure(f'{hardware.description}, and libtpu is missing: JAX would run on the CPU', pip_install('tpu'))
    if hardware.nvidia is None:
        return failure(
            f'{hardware.description}, but the driver does not respond ({hardware.problem})',
            f'install driver {_dotted(OLDEST_DRIVERS["cuda12"])} or later; in a container, start it with --gpus all',
        )
    driver = hardware.nvidia.driver
    installed = [extra for extra, package in CUDA_PLUGINS.items() if is_installed(package)]
    text = f'{hardware.description}, driver {_dotted(driver)} (CUDA {_dotted(hardware.nvidia.cuda)})'
    if driver < OLDEST_DRIVERS['cuda12']:
        return failure(f'{text}: too old for JAX', f'install driver {_dotted(OLDEST_DRIVERS["cuda12"])} or later')
    if not installed:
        return failure(
            f"{text}, and JAX's plugin is missing: it would run on the CPU",
            pip_install(recommended_extra(hardware.nvidia)),
        )
    if len(installed) > 1:
        return warning(
            f'{text}; plugins for {" and ".join(installed)} are both installed, and JAX uses only one of them',
            f'pip uninstall {" ".join(_packages_of(installed[0]))}',
        )
    (extra,) = installed
    oldest = OLDEST_DRIVERS[extra]
    if driver < oldest:
        return failure(
            f'{text}: {CUDA_PLUGINS[extra]} requires {_dotted(oldest)} or later',
            f'pip uninstall {" ".join(_packages_of(extra))}; '
            f'{pip_install(recommended_extra(hardware.nvidia))}; or install a newer driver',
        )
    return ok(f'{text}, {CUDA_PLUGINS[extra]}')


def check_gpus(context: CheckContext) -> CheckResult:
    """Checks for hardware errors and for other processes on the GPUs. Call it before JAX starts in this process."""
    if context.hardware.nvidia is None:
        return skipped(f'no NVIDIA driver to query ({context.hardware.description})')
    return evaluate_gpus(context.hardware.nvidia, context.environment.get('CUDA_VISIBLE_DEVICES'))


def evaluate_gpus(nvidia: Nvidia, visible: str | None) -> CheckResult:
    """Evaluates the GPUs that CUDA_VISIBLE_DEVICES makes visible to a run; None: all."""
    findings = []
    visible_gpus = [(index, gpu) for index, gpu in enumerate(nvidia.gpus) if _is_shown(index, gpu, visible)]
    for index, gpu in visible_gpus:
        name = f'GPU {index}'
        if gpu.ecc_errors:
            findings.append(
                failure(
                    f'{name}: {gpu.ecc_errors} uncorrected memory errors',
                    'reset or replace the GPU (nvidia-smi -q -d ECC)',
                )
            )
        if gpu.remap_failed:
            findings.append(failure(f'{name}: faulty memory could not be remapped', 'replace the GPU'))
        elif gpu.remap_pending:
            findings.append(
                warning(f'{name}: faulty memory will be remapped after a reset', 'reset the GPU or restart the machine')
            )
        if gpu.throttled:
            findings.append(
                warning(
                    f'{name}: throttled ({", ".join(gpu.throttled)})',
                    'check cooling and power (nvidia-smi -q -d PERFORMANCE)',
                )
            )
        if gpu.processes:
            findings.append(
                warning(
                    f'{name}: used by process {", ".join(map(str, gpu.processes))}'
                    + (f' ({format_bytes(gpu.used)})' if gpu.used else ''),
                    'stop the process, or choose other GPUs with CUDA_VISIBLE_DEVICES',
                )
            )
        elif gpu.used and gpu.used > IDLE_BYTES:
            # In a container, processes of other containers are not visible.
            findings.append(
                warning(
                    f'{name}: {format_bytes(gpu.used)} are used by processes that are not visible here',
                    'stop these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES',
                )
            )
    kinds = Counter(gpu.name for _, gpu in visible_gpus)
    if len(kinds) > 1:
        detail = ', '.join(f'{count} × {kind}' for kind, count in kinds.items())
        findings.append(
            warning(f'GPUs of several kinds: {detail}', 'choose GPUs of one kind with CUDA_VISIBLE_DEVICES')
        )
    if not findings:
        detail = 'no memory errors, ' if any(gpu.ecc_errors is not None for _, gpu in visible_gpus) else ''
        named = f'{len(visible_gpus)} × {next(iter(kinds))}' if visible_gpus else 'none visible to a run'
        findings.append(ok(f'{named}: {detail}not throttled, no other processes'))
    return combine(findings)


def _is_shown(index: int, gpu: Gpu, visible: str | None) -> bool:
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(',')]
    # MIG instances have their own UUIDs.
    return str(index) in names or any(name and (gpu.uuid.startswith(name) or name.startswith('MIG-')) for name in names)


def _packages_of(extra: str) -> list[str]:
    return [CUDA_PLUGINS[extra], CUDA_PLUGINS[extra].replace('plugin', 'pjrt')]


def _dotted(version: tuple[int, ...]) -> str:
    return '.'.join(map(str, version))


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # libtpu of a TPU machine may be installed without pip metadata.
        return importlib.util.find_spec(package.replace('-', '_')) is not None
    return True
