"""What the accelerators of this process tell of themselves: use, memory, heat, power, clocks, errors.

NVIDIA's by NVML (`pynvml`), TPUs by libtpu's own `tpumonitoring`. What is not there, or does not answer, is absent: no
function here raises. None asks JAX, whose calls may wait for the step that is under way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# One accelerator: see `read_devices` for the keys.
Reading = dict[str, Any]


class LocalDevice(NamedTuple):
    """A device of this process, as JAX names it."""

    platform: str
    kind: str
    # Its number among those that the driver shows to this process.
    ordinal: int


class Accelerators:
    """The devices that this process computes on."""

    def __init__(self, devices: Sequence[LocalDevice]):
        """Asks nobody yet: a driver that hangs is the reading's trouble."""
        self._devices = devices
        self._read: Callable[[], list[Reading]] | None = None

    def read(self) -> list[Reading]:
        """One entry for each device that tells anything; none on a CPU.

        Keys, each of which may be absent: `index` (of JAX in this process), `kind`, `use_percent` (time in which it
        worked), `memory_bytes` (taken from the driver; JAX takes its share at once), `memory_total_bytes`,
        `temperature_c`, `power_w`, `power_limit_w`, `clock_mhz`, `clock_max_mhz`, `throttled` (why its clock is held
        down), `ecc_errors` (uncorrected, since the driver was loaded).
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
        # A library that is absent, or a driver that is not NVIDIA's.
        except Exception:
            pass
        return list


def local_devices() -> list[LocalDevice]:
    """Those of this process; JAX must have started."""
    import jax

    return [
        LocalDevice(device.platform, device.device_kind, getattr(device, 'local_hardware_id', None) or 0)
        for device in jax.local_devices()
    ]


# Bits of NVML's reasons why a clock is lower than it could be. Idleness and what an administrator has set are none.
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
    chosen = _visible(pynvml)
    handles = [(index, device.kind, _slice_of(pynvml, chosen(device.ordinal))) for index, device in enumerate(devices)]

    def read() -> list[Reading]:
        return [{'index': index, 'kind': kind, **_read_nvidia(pynvml, *handle)} for index, kind, handle in handles]

    return read


def _visible(nvml: Any) -> Any:
    """A function: number of a device in CUDA → NVML's handle.

    CUDA_VISIBLE_DEVICES lists numbers, UUIDs or beginnings of these.
    """
    listed = os.environ.get('CUDA_VISIBLE_DEVICES')
    if listed is None:
        # Where GPUs are of one kind, both number them by their places on the bus.
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
    """The handle of what CUDA computes on and that of the whole GPU, which differ where that is cut up (MIG)."""
    if _try_read(nvml, lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle)):
        return handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    if (_try_read(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)) or [0])[0]:
        # Of a GPU that is cut up CUDA takes the first part.
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0), handle
    return handle, handle


def _read_nvidia(nvml: Any, part: Any, whole: Any) -> Reading:
    use = _try_read(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(part))
    memory = _try_read(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(part))
    reasons = _try_read(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(whole))
    watts = None, None
    if part is whole:
        # The power of a whole GPU is not that of one part.
        power = _try_read(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(whole))
        limit = _try_read(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole))
        watts = power and power / 1000, limit and limit / 1000
    reading = {
        'use_percent': use and use.gpu,
        'memory_bytes': memory and memory.used,
        'memory_total_bytes': memory and memory.total,
        'temperature_c': _try_read(nvml, lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)),
        'power_w': watts[0],
        'power_limit_w': watts[1],
        'clock_mhz': _try_read(nvml, lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM)),
        'clock_max_mhz': _try_read(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, nvml.NVML_CLOCK_SM)),
        'throttled': None if reasons is None else [name for bit, name in THROTTLES.items() if reasons & bit],
        'ecc_errors': _try_read(
            nvml,
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        ),
    }
    return {key: value for key, value in reading.items() if value is not None}


def _try_read(nvml: Any, question: Callable[[], Any]) -> Any:
    """The answer; None where the device, the driver or the library has none."""
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
        # Of each chip, which may be two devices, in their order.
        told = {key: _tpu_metric(tpumonitoring, name) for key, name in names.items()}
        chips = max(map(len, told.values()))
        kinds = [device.kind for device in devices[:: max(1, len(devices) // chips)]] if chips else []
        return [
            {
                'index': index,
                'kind': kind,
                **{key: values[index] for key, values in told.items() if index < len(values)},
            }
            for index, kind in enumerate(kinds[:chips])
        ]

    return read


def _tpu_metric(tpumonitoring: Any, name: str) -> list[float]:
    # The library raises plain exceptions, while the runtime starts above all.
    try:
        return [float(value) for value in tpumonitoring.get_metric(name).data()]
    except Exception:
        return []
