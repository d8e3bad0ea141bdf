"""Reads the state of NVIDIA GPUs from the driver (NVML) without creating a CUDA context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from maxlm.hardware.device_stats import THROTTLES

# Reasons for a reduced clock that indicate a fault or poor cooling, i.e. not a power limit or synchronized clocks.
FAULTS = frozenset(THROTTLES) - {0x04, 0x10}


class NvidiaError(Exception):
    """Error of the NVIDIA driver or of its Python package. The message is one line."""


class Gpu(NamedTuple):
    """State of one GPU. Unavailable values are None.

    Attributes:
        name: name from the driver, e.g. `NVIDIA H100 80GB HBM3`.
        uuid: UUID, as accepted by CUDA_VISIBLE_DEVICES.
        memory: total memory in bytes.
        used: used memory in bytes.
        ecc_errors: number of uncorrected ECC errors since the driver was loaded.
        remap_pending: True if a faulty memory row will be replaced at the next reset.
        remap_failed: True if a faulty memory row could not be replaced.
        throttled: current reasons for a reduced clock that are in FAULTS.
        processes: ids of the processes that compute on the GPU.
    """

    name: str
    uuid: str = ''
    memory: int | None = None
    used: int | None = None
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttled: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()


class Nvidia(NamedTuple):
    """State of the NVIDIA driver.

    Attributes:
        driver: version of the driver, e.g. (580, 65, 6).
        cuda: latest CUDA version that the driver supports, e.g. (13, 0).
        gpus: all GPUs.
    """

    driver: tuple[int, ...]
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def read_nvidia() -> Nvidia:
    """Returns the current state of the driver and its GPUs.

    Raises:
        NvidiaError: there is no driver, or it does not respond.
    """
    try:
        import pynvml as nvml
    except ImportError as error:
        raise NvidiaError('the package nvidia-ml-py is missing') from error
    try:
        with _open(nvml):
            cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
            return Nvidia(
                tuple(int(part) for part in _text(nvml.nvmlSystemGetDriverVersion()).split('.')),
                (cuda // 1000, cuda % 1000 // 10),
                tuple(
                    _read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
                    for index in range(nvml.nvmlDeviceGetCount())
                ),
            )
    except nvml.NVMLError as error:
        raise NvidiaError(' '.join(str(error).split()) or type(error).__name__) from error


@contextlib.contextmanager
def _open(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, gpu: Any) -> Gpu:
    def supported(query: Callable[[], Any]) -> Any:
        """Returns the result of a query, or None if this GPU or driver does not support it."""
        try:
            return query()
        except (nvml.NVMLError, AttributeError):
            return None

    memory = supported(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
    # Counts of corrected and uncorrected errors, pending flag, failure flag.
    rows = supported(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
    reasons = supported(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)) or 0
    processes = supported(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) or ()
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(gpu)),
        uuid=_text(supported(lambda: nvml.nvmlDeviceGetUUID(gpu)) or ''),
        memory=memory and int(memory.total),
        used=memory and int(memory.used),
        ecc_errors=supported(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            )
        ),
        remap_pending=rows and bool(rows[2]),
        remap_failed=rows and bool(rows[3]),
        throttled=tuple(THROTTLES[bit] for bit in sorted(FAULTS) if reasons & bit),
        processes=tuple(int(process.pid) for process in processes),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
