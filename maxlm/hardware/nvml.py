"""What NVIDIA's driver tells of its GPUs (NVML), without taking hold of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from maxlm.hardware.device_stats import THROTTLES

# Of the reasons for a lower clock those that mean a fault or poor cooling. A power limit that was reached and clocks
# that are kept equal are none.
FAULTS = frozenset(THROTTLES) - {0x04, 0x10}


class NvidiaError(Exception):
    """The driver does not answer; one line."""


class Gpu(NamedTuple):
    """One GPU; None is what it does not tell.

    Attributes:
        name: the driver's, e.g. `NVIDIA H100 80GB HBM3`.
        uuid: as CUDA_VISIBLE_DEVICES may list it.
        memory: bytes.
        used: bytes of it that are taken.
        ecc_errors: uncorrected, since the driver was loaded.
        remap_pending: whether a faulty row of memory waits for a reset to be replaced.
        remap_failed: whether one could not be replaced.
        throttled: why its clock is low now, of the reasons that are faults.
        processes: numbers of the processes that compute on it.
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
    """Version of the driver, e.g. (580, 65, 6), the newest CUDA that it runs, e.g. (13, 0), and all GPUs."""

    driver: tuple[int, ...]
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def read_nvidia() -> Nvidia:
    """All that is told now.

    Raises:
        NvidiaError: there is no driver, or it does not answer.
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
    def told(ask: Callable[[], Any]) -> Any:
        """None where this GPU, or this driver, does not tell."""
        try:
            return ask()
        except (nvml.NVMLError, AttributeError):
            return None

    memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
    # Corrected, uncorrected, a reset is pending, a replacement has failed.
    rows = told(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
    reasons = told(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)) or 0
    processes = told(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) or ()
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(gpu)),
        uuid=_text(told(lambda: nvml.nvmlDeviceGetUUID(gpu)) or ''),
        memory=memory and int(memory.total),
        used=memory and int(memory.used),
        ecc_errors=told(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            )
        ),
        remap_pending=rows and bool(rows[2]),
        remap_failed=rows and bool(rows[3]),
        throttled=tuple(THROTTLES[bit] for bit in sorted(FAULTS) if reasons & bit),
        processes=tuple(int(process.pid) for process in processes),
    )


def _text(told: str | bytes) -> str:
    return told.decode() if isinstance(told, bytes) else told
