"""Tests the identity of devices with a fake of NVML and of the version functions of JAX's plugin."""

import sys
import types

import jax
import pytest

from maxlm.hardware import identity
from maxlm.hardware.device_stats import LocalDevice
from maxlm.hardware.identity import identify, summary


class FakeNvml(types.ModuleType):
    """Fake of NVML with two GPUs, which lists unsupported functions in `missing`."""

    NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC = 1, 1, 1

    class NVMLError(Exception):
        pass

    def __init__(self, missing=()):
        super().__init__('pynvml')
        values = {
            'nvmlInit': lambda: None,
            'nvmlSystemGetDriverVersion': lambda: b'580.65.06',
            'nvmlDeviceGetHandleByIndex': lambda index: index,
            'nvmlDeviceGetUUID': lambda gpu: f'GPU-{gpu}',
            'nvmlDeviceGetVbiosVersion': lambda gpu: '96.00.74.00.01',
            'nvmlDeviceGetClockInfo': lambda gpu, clock: 1500,
            'nvmlDeviceGetMaxClockInfo': lambda gpu, clock: 1980,
            'nvmlDeviceGetEnforcedPowerLimit': lambda gpu: 700_000,
            'nvmlDeviceGetTotalEccErrors': lambda gpu, kind, counter: 3 * gpu,
            'nvmlDeviceGetRemappedRows': lambda gpu: (gpu, 1, 0, 0),
        }
        for name, value in values.items():
            setattr(self, name, self._unsupported if name in missing else value)

    def _unsupported(self, *_):
        raise self.NVMLError('Not Supported')


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    devices = [LocalDevice('gpu', 'NVIDIA H100', ordinal) for ordinal in range(2)]
    monkeypatch.setattr(identity, 'local_devices', lambda: devices)
    numbers = {'cudnn_get_version': 92501, 'cuda_runtime_get_version': 13000}
    monkeypatch.setattr(identity, '_from_jax', lambda name: numbers[name])
    monkeypatch.setattr(identity.importlib.metadata, 'version', plugin_version)
    monkeypatch.setitem(sys.modules, 'pynvml', FakeNvml())


def plugin_version(package):
    if package != 'jax-cuda13-plugin':
        raise identity.importlib.metadata.PackageNotFoundError
    return '0.11.2'


def test_identity_of_gpus(gpus):
    found = identify()
    gpu = {'kind': 'NVIDIA H100', 'vbios': '96.00.74.00.01', 'clock_mhz': 1500, 'clock_max_mhz': 1980}
    assert found == {
        'cudnn': '9.25.1',
        'cuda': '13.0',
        'plugin': 'jax-cuda13-plugin 0.11.2',
        'driver': '580.65.06',
        'devices': [
            {
                'index': index,
                'uuid': f'GPU-{index}',
                **gpu,
                'power_limit_w': 700.0,
                'ecc_errors': errors,
                'remapped_rows': rows,
            }
            for index, errors, rows in ((0, 0, 1), (1, 3, 2))
        ],
    }
    assert summary(found) == (
        'driver 580.65.06, cuda 13.0, cudnn 9.25.1, jax-cuda13-plugin 0.11.2; device 0: NVIDIA H100, GPU-0, VBIOS '
        '96.00.74.00.01, 1500 MHz, maximum 1980 MHz, limit 700.0 W, 0 uncorrected memory errors, 1 remapped rows; '
        'device 1: NVIDIA H100, GPU-1, VBIOS 96.00.74.00.01, 1500 MHz, maximum 1980 MHz, limit 700.0 W, 3 uncorrected '
        'memory errors, 2 remapped rows'
    )


def test_unsupported_values_are_absent(gpus, monkeypatch):
    missing = ('nvmlDeviceGetVbiosVersion', 'nvmlDeviceGetTotalEccErrors', 'nvmlDeviceGetRemappedRows')
    monkeypatch.setitem(sys.modules, 'pynvml', FakeNvml(missing))
    assert set(identify()['devices'][0]) == {
        'index', 'kind', 'uuid', 'clock_mhz', 'clock_max_mhz', 'power_limit_w'
    }  # fmt: skip


@pytest.mark.parametrize('nvml', [None, FakeNvml(('nvmlInit',)), FakeNvml(('nvmlDeviceGetHandleByIndex',))])
def test_a_driver_that_does_not_answer_leaves_the_kinds(gpus, monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, 'pynvml', nvml)
    found = identify()
    assert 'driver' not in found
    assert found['devices'] == [{'index': index, 'kind': 'NVIDIA H100'} for index in range(2)]


def test_cpus_have_no_driver_and_no_plugin():
    assert identify() == {'devices': [{'index': index, 'kind': 'cpu'} for index in range(jax.local_device_count())]}


@pytest.mark.parametrize('value', [None, [], 'text', {'devices': [None, 3, {'index': [], 'uuid': {}}], 'driver': 5}])
def test_summary_of_identities_from_damaged_files(value):
    assert isinstance(summary(value), str)
