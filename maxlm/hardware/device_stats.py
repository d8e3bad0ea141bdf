"""Statistics of this process's accelerators: utilization, memory, temperature, power, clocks, errors.

NVIDIA GPUs are read through NVML (`pynvml`), TPUs through `tpumonitoring` of libtpu. Values that are unavailable are
absent. No function raises an error or calls JAX, because JAX calls may wait for the current step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Statistics of one accelerator: see `Accelerators.read` for the keys.
Reading = dict[str, Any]


class LocalDevice(NamedTuple):
    """Device of this process.

    Attributes:
        platform, kind: platform and device kind in JAX.
        ordinal: index among the devices that the driver shows to this process.
    """

    platform: str
    kind: str
    ordinal: int


class Accelerators:
    """Accelerators used by this process."""

    def __init__(self, devices: Sequence[LocalDevice]):
        """Stores the devices without opening a driver, because a driver call can hang."""
        self._devices = devices
        self._read: Callable[[], list[Reading]] | None = None

    def read(self) -> list[Reading]:
        """Returns one entry for each device with available statistics; empty on a CPU.

        Keys, each of which may be absent: `index` (of JAX in this process), `kind`, `use_percent` (percentage of time
        in which it was busy), `memory_bytes` (allocated from the driver; JAX preallocates its part),
        `memory_total_bytes`, `temperature_c`, `power_w`, `power_limit_w`, `clock_mhz`, `clock_max_mhz`, `throttled`
        (reasons for a reduced clock), `ecc_errors` (uncorrected, since the driver was loaded).
        """
        if self._read is None:
            self._read = self._open()
        return self._read()

    def _open(self) -> Callable[[], list[Reading]]:
        platforms = {device.platform for device in self._devices}
        try:
            if platforms == {'gpu'}:
                return _open_nvidia(self._devices)
            if platforms == {'tpu'}:
                return _open_tpus(self._devices)
        # The library is not installed, or the driver is not NVIDIA's.
        except Exception:
            pass
        return list


def local_devices() -> list[LocalDevice]:
    """Returns the devices of this process. JAX must be initialized."""
    import jax

    return [
        LocalDevice(device.platform, device.device_kind, getattr(device, 'local_hardware_id', None) or 0)
        for device in jax.local_devices()
    ]


# NVML bits of the reasons for a reduced clock, except idleness and settings of an administrator.
THROTTLES = {
    0x04: 'power',
    0x08: 'hardware slowdown',
    0x10: 'sync boost',
    0x20: 'thermal',
    0x40: 'hardware thermal',
    0x80: 'power brake',
}


def _open_nvidia(devices: Sequence[LocalDevice]) -> Callable[[], list[Reading]]:
    import pynvml

    pynvml.nvmlInit()
    handles = nvidia_handles(pynvml, devices)

    def read() -> list[Reading]:
        return [
            {'index': index, 'kind': device.kind, **_read_nvidia(pynvml, *handle)}
            for index, (device, handle) in enumerate(zip(devices, handles, strict=True))
        ]

    return read


def nvidia_handles(nvml: Any, devices: Sequence[LocalDevice]) -> list[tuple[Any, Any]]:
    """Returns the NVML handles of each device: of the part that CUDA uses, and of the complete GPU."""
    chosen = _visible(nvml)
    return [_slice_of(nvml, chosen(device.ordinal)) for device in devices]


def _visible(nvml: Any) -> Any:
    """Returns a function from the CUDA index of a device to its NVML handle.

    CUDA_VISIBLE_DEVICES lists indices, UUIDs or prefixes of UUIDs.
    """
    listed = os.environ.get('CUDA_VISIBLE_DEVICES')
    if listed is None:
        # For GPUs of the same kind, CUDA and NVML both order devices by their position on the PCI bus.
        return nvml.nvmlDeviceGetHandleByIndex

    def find(ordinal: int) -> Any:
        name = listed.split(',')[ordinal].strip()
        if name.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith('MIG-'):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        (found,) = (handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(name))
        return found

    return find


def _slice_of(nvml: Any, handle: Any) -> tuple[Any, Any]:
    """Returns the handles of the device that CUDA uses and of its physical GPU. They differ with MIG."""
    if try_read(nvml, lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle)):
        return handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    if (try_read(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)) or [0])[0]:
        # CUDA uses the first MIG instance of a partitioned GPU.
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0), handle
    return handle, handle


def _read_nvidia(nvml: Any, part: Any, whole: Any) -> Reading:
    use = try_read(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(part))
    memory = try_read(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(part))
    reasons = try_read(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(whole))
    watts = None, None
    if part is whole:
        # The power of a GPU is not that of one MIG instance.
        power = try_read(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(whole))
        limit = try_read(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole))
        watts = power and power / 1000, limit and limit / 1000
    reading = {
        'use_percent': use and use.gpu,
        'memory_bytes': memory and memory.used,
        'memory_total_bytes': memory and memory.total,
        'temperature_c': try_read(nvml, lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)),
        'power_w': watts[0],
        'power_limit_w': watts[1],
        'clock_mhz': try_read(nvml, lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM)),
        'clock_max_mhz': try_read(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, nvml.NVML_CLOCK_SM)),
        'throttled': None if reasons is None else [name for bit, name in THROTTLES.items() if reasons & bit],
        'ecc_errors': try_read(
            nvml,
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        ),
    }
    return {key: value for key, value in reading.items() if value is not None}


def try_read(nvml: Any, question: Callable[[], Any]) -> Any:
    """Returns the result of a query, or None if the device, driver or library does not support it."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return None


def _open_tpus(devices: Sequence[LocalDevice]) -> Callable[[], list[Reading]]:
    from libtpu.sdk import tpumonitoring

    names = {
        'use_percent': 'duty_cycle_pct',
        'memory_bytes': 'hbm_capacity_usage',
        'memory_total_bytes': 'hbm_capacity_total',
    }

    def read() -> list[Reading]:
        # Values are per chip, in order. A chip may be two devices.
        by_key = {key: _tpu_metric(tpumonitoring, name) for key, name in names.items()}
        chips = max(map(len, by_key.values()))
        kinds = [device.kind for device in devices[:: max(1, len(devices) // chips)]] if chips else []
        return [
            {
                'index': index,
                'kind': kind,
                **{key: values[index] for key, values in by_key.items() if index < len(values)},
            }
            for index, kind in enumerate(kinds[:chips])
        ]

    return read


def _tpu_metric(tpumonitoring: Any, name: str) -> list[float]:
    # The library raises plain exceptions, especially while the runtime starts.
    try:
        return [float(value) for value in tpumonitoring.get_metric(name).data()]
    except Exception:
        return []
