"""Identity of the devices of this process: serial numbers, firmware, driver, libraries, clocks and memory errors.

Results of a device can be traced to it only if they are recorded with it. A device with a defect may compute wrong
results without an error.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

from maxlm.hardware.device_stats import LocalDevice, local_devices, nvidia_handles, try_read
from maxlm.storage.json_fields import items, text

# Plugins of JAX that contain XLA's compiler for a kind of device.
PLUGINS = ('jax-cuda12-plugin', 'jax-cuda13-plugin', 'libtpu')


def identify() -> dict[str, Any]:
    """Returns the identity of this process's devices as JSON values. JAX must be initialized.

    The keys are `driver`, `cudnn` and `cuda` (versions), `plugin` (name and version of JAX's plugin), and `devices`.
    Each entry of `devices` has `index`, `kind`, `uuid`, `vbios`, `clock_mhz`, `clock_max_mhz`, `power_limit_w`,
    `ecc_errors` (uncorrected, counted in the device) and `remapped_rows` (of memory with errors). A key is absent if
    its value is unavailable. A UUID identifies a GPU; it is no secret.
    """
    devices = local_devices()
    found: dict[str, Any] = {'cudnn': cudnn_version(), 'cuda': _cuda_version(), 'plugin': _plugin(devices[0].platform)}
    entries = [{'index': index, 'kind': device.kind} for index, device in enumerate(devices)]
    if devices[0].platform == 'gpu':
        driver, parts = _read_nvidia(devices)
        found['driver'] = driver
        entries = [{**entry, **part} for entry, part in zip(entries, parts, strict=True)]
    return {**{key: value for key, value in found.items() if value}, 'devices': entries}


def summary(identity: Any) -> str:
    """Returns an identity as one line. Identities from the files of a run may have any values."""
    versions = [f'{name} {text(identity, name)}' for name in ('driver', 'cuda', 'cudnn') if text(identity, name)]
    versions += [text(identity, 'plugin')] if text(identity, 'plugin') else []
    return '; '.join([', '.join(versions)] * bool(versions) + [_describe(each) for each in items(identity, 'devices')])


def cudnn_version() -> str:
    """Returns the version of the cuDNN library that JAX loaded, e.g. `9.25.1`; '' if there is none."""
    number = _from_jax('cudnn_get_version')
    return f'{number // 10_000}.{number // 100 % 100}.{number % 100}' if number else ''


def installed_version(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_version() -> str:
    number = _from_jax('cuda_runtime_get_version')
    return f'{number // 1000}.{number % 1000 // 10}' if number else ''


def _from_jax(name: str) -> int:
    """Returns a number from the version functions of JAX's CUDA plugin; 0 if it is not installed."""
    from jax._src.lib import cuda_versions

    # JAX has no public function for this. The functions raise RuntimeError if CUDA cannot be loaded.
    try:
        return int(getattr(cuda_versions, name)())
    except (AttributeError, RuntimeError):
        return 0


def _plugin(platform: str) -> str:
    for package in PLUGINS:
        is_of_platform = (package == 'libtpu') == (platform == 'tpu') and platform != 'cpu'
        if is_of_platform and (version := installed_version(package)):
            return f'{package} {version}'
    return ''


def _read_nvidia(devices: Sequence[LocalDevice]) -> tuple[str, list[dict[str, Any]]]:
    """Returns the version of the driver, and the properties of each device; '' and empty ones without NVML."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        driver = nvml.nvmlSystemGetDriverVersion()
        parts = [_read_gpu(nvml, *handles) for handles in nvidia_handles(nvml, devices)]
    # The driver is not NVIDIA's, or does not know a device. The identity is not needed for a run.
    except Exception:
        return '', [{} for _ in devices]
    return _text(driver), parts


def _read_gpu(nvml: Any, part: Any, whole: Any) -> dict[str, Any]:
    queries: dict[str, Callable[[], Any]] = {
        'uuid': lambda: _text(nvml.nvmlDeviceGetUUID(part)),
        'vbios': lambda: _text(nvml.nvmlDeviceGetVbiosVersion(whole)),
        'clock_mhz': lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM),
        'clock_max_mhz': lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, nvml.NVML_CLOCK_SM),
        'power_limit_w': lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole) / 1000,
        'ecc_errors': lambda: nvml.nvmlDeviceGetTotalEccErrors(
            whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
        ),
        # Counts of rows with corrected and uncorrected errors, pending flag, failure flag.
        'remapped_rows': lambda: sum(nvml.nvmlDeviceGetRemappedRows(whole)[:2]),
    }
    found = {name: try_read(nvml, query) for name, query in queries.items()}
    return {name: value for name, value in found.items() if value is not None}


# Key → form of its value in `summary`.
FORMS = {
    'kind': '{}',
    'uuid': '{}',
    'vbios': 'VBIOS {}',
    'clock_mhz': '{} MHz',
    'clock_max_mhz': 'maximum {} MHz',
    'power_limit_w': 'limit {} W',
    'ecc_errors': '{} uncorrected memory errors',
    'remapped_rows': '{} remapped rows',
}


def _describe(device: Any) -> str:
    parts = [form.format(text(device, key)) for key, form in FORMS.items() if text(device, key)]
    return f'device {text(device, "index")}: {", ".join(parts)}'


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
