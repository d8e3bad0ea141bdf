"""Provides fake machines: GPUs on the bus, drivers and their reports."""

import types

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.jax_subprocess import JaxStart
from maxlm.formatting import GIB
from maxlm.hardware.detect import Hardware
from maxlm.hardware.nvml import Gpu, Nvidia

H100 = Gpu('NVIDIA H100 80GB HBM3', uuid='GPU-1', memory=80 * GIB, used=GIB // 2, ecc_errors=0)
CPU, TPU, DRIVERLESS = Hardware(), Hardware(tpu_chips=4), Hardware(2, 0, None, 'Driver Not Loaded')


def gpus(*each, driver=(580, 65, 6), cuda=(13, 0)):
    """Returns a machine with these GPUs, or with two healthy ones."""
    each = each or (H100, H100)
    return Hardware(len(each), 0, Nvidia(driver, cuda, each))


def case_on(hardware, start=None, **facts):
    """Returns a check context with given hardware and a given JAX startup."""
    case = CheckContext(**{'environment': {}, **facts})
    vars(case)['hardware'] = hardware
    vars(case)['jax_start'] = start or JaxStart(platform='cpu', kinds=('cpu',))
    return case


class NVMLError(Exception):
    """Fake of NVML's error."""


def fake_nvml(**changes):
    """Returns a fake `pynvml` module with one healthy GPU. Functions that are None raise an error."""

    def silent(*_):
        raise NVMLError('Not Supported')

    functions = {
        'nvmlInit': lambda: None,
        'nvmlShutdown': lambda: None,
        'nvmlSystemGetDriverVersion': lambda: '570.124.06',
        'nvmlSystemGetCudaDriverVersion_v2': lambda: 12080,
        'nvmlDeviceGetCount': lambda: 1,
        'nvmlDeviceGetHandleByIndex': lambda index: index,
        'nvmlDeviceGetName': lambda gpu: b'NVIDIA H100 80GB HBM3',
        'nvmlDeviceGetUUID': lambda gpu: 'GPU-1',
        'nvmlDeviceGetMemoryInfo': lambda gpu: types.SimpleNamespace(total=80 * GIB, used=GIB),
        'nvmlDeviceGetRemappedRows': lambda gpu: (0, 0, 0, 0),
        'nvmlDeviceGetTotalEccErrors': lambda gpu, kind, counter: 0,
        'nvmlDeviceGetCurrentClocksThrottleReasons': lambda gpu: 0,
        'nvmlDeviceGetComputeRunningProcesses': lambda gpu: [],
        **changes,
    }
    constants = {'NVML_MEMORY_ERROR_TYPE_UNCORRECTED': 1, 'NVML_VOLATILE_ECC': 0, 'NVMLError': NVMLError}
    known = {name: silent if function is None else function for name, function in functions.items()}
    return types.SimpleNamespace(**constants, **known)
