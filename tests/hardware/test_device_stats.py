"""Tests accelerator readings with fakes of NVML and of libtpu's monitoring."""

import sys
import types
from collections import namedtuple

import pytest

from maxlm.hardware.device_stats import Accelerators, LocalDevice, local_devices

MIB, GIB = 2**20, 2**30
POWER, IDLE, THERMAL = 0x4, 0x1, 0x20
Use = namedtuple('Use', 'gpu memory')
Memory = namedtuple('Memory', 'total free used')


class Gpu:
    """A GPU or a MIG instance."""

    def __init__(self, number, *, reasons=0, ecc=0, instances=(), parent=None):
        self.number, self.reasons, self.ecc, self.instances, self.parent = number, reasons, ecc, instances, parent
        self.uuid = f'GPU-{number:04x}-aaaa' if parent is None else f'MIG-{number:04x}'
        for instance in instances:
            instance.parent = self


class FakeNvml(types.ModuleType):
    """Fake of the NVML functions in use, with the library's errors."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, gpus, missing=()):
        super().__init__('pynvml')
        self.gpus, self.missing, self.calls = gpus, missing, 0

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if not name.startswith('nvml'):
            return value

        def call(*arguments):
            self.calls += 1
            if name in self.missing:
                raise self.NVMLError('Not Supported')
            return value(*arguments)

        return call

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu):  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        (found,) = (instance for gpu in self.gpus for instance in (gpu, *gpu.instances) if instance.uuid == uuid)
        return found

    def nvmlDeviceIsMigDeviceHandle(self, gpu):  # noqa: N802
        return gpu.parent is not None

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, instance):  # noqa: N802
        return instance.parent

    def nvmlDeviceGetMigMode(self, gpu):  # noqa: N802
        return [int(bool(gpu.instances)), 0]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, index):  # noqa: N802
        return gpu.instances[index]

    def nvmlDeviceGetUtilizationRates(self, gpu):  # noqa: N802
        if gpu.parent:
            raise self.NVMLError('Not Supported')
        return Use(90 + gpu.number, 10)

    def nvmlDeviceGetMemoryInfo(self, gpu):  # noqa: N802
        return Memory(80 * GIB, 0, (60 + gpu.number) * GIB)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):  # noqa: N802
        return gpu.reasons

    def nvmlDeviceGetPowerUsage(self, gpu):  # noqa: N802
        return 650_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):  # noqa: N802
        return 700_000

    def nvmlDeviceGetTemperature(self, gpu, sensor):  # noqa: N802
        return 60 + gpu.number

    def nvmlDeviceGetClockInfo(self, gpu, clock):  # noqa: N802
        return 1500

    def nvmlDeviceGetMaxClockInfo(self, gpu, clock):  # noqa: N802
        return 1980

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter):  # noqa: N802
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return gpu.ecc


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)

    def install(gpus, **options):
        fake = FakeNvml(gpus, **options)
        monkeypatch.setitem(sys.modules, 'pynvml', fake)
        return fake

    return install


def gpus(*ordinals):
    return [LocalDevice('gpu', 'NVIDIA H100', ordinal) for ordinal in ordinals]


def test_all_readings_of_a_gpu(nvml):
    nvml([Gpu(0), Gpu(1, reasons=POWER | THERMAL | IDLE, ecc=2)])
    first, second = Accelerators(gpus(0, 1)).read()
    assert first == {
        'index': 0,
        'kind': 'NVIDIA H100',
        'use_percent': 90,
        'memory_bytes': 60 * GIB,
        'memory_total_bytes': 80 * GIB,
        'temperature_c': 60,
        'power_w': 650.5,
        'power_limit_w': 700,
        'clock_mhz': 1500,
        'clock_max_mhz': 1980,
        'throttled': [],
        'ecc_errors': 0,
    }
    assert (second['throttled'], second['ecc_errors']) == (['power', 'thermal'], 2)


def test_unsupported_readings_are_absent(nvml):
    missing = ('nvmlDeviceGetTotalEccErrors', 'nvmlDeviceGetPowerUsage', 'nvmlDeviceGetMigMode')
    nvml([Gpu(0)], missing=missing)
    (reading,) = Accelerators(gpus(0)).read()
    assert {'ecc_errors', 'power_w'}.isdisjoint(reading)
    assert {'power_limit_w', 'use_percent', 'throttled'} <= set(reading)


@pytest.mark.parametrize(
    ('visible', 'ordinals', 'temperatures'),
    [
        (None, (0, 2), [60, 62]),
        ('2,0', (0, 1), [62, 60]),
        ('3, 1', (1,), [61]),
        ('GPU-0002-aaaa,GPU-0001', (0, 1), [62, 61]),
    ],
)
def test_only_the_devices_of_this_process(nvml, monkeypatch, visible, ordinals, temperatures):
    nvml([Gpu(number) for number in range(4)])
    if visible:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    assert [reading['temperature_c'] for reading in Accelerators(gpus(*ordinals)).read()] == temperatures


@pytest.mark.parametrize('visible', ['MIG-0007', '0', None])
def test_mig_instance(nvml, monkeypatch, visible):
    nvml([Gpu(0, reasons=THERMAL, instances=(Gpu(7, parent=True), Gpu(8, parent=True)))])
    if visible:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    (reading,) = Accelerators(gpus(0)).read()
    # Memory is that of the instance; temperature and clock are those of the GPU. Use and power are not available.
    assert reading['memory_bytes'] == 67 * GIB
    assert (reading['temperature_c'], reading['throttled']) == (60, ['thermal'])
    assert {'use_percent', 'power_w', 'power_limit_w'}.isdisjoint(reading)


def test_missing_driver_is_queried_once(nvml):
    fake = nvml([Gpu(0)], missing=('nvmlInit',))
    accelerators = Accelerators(gpus(0))
    assert accelerators.read() == accelerators.read() == []
    assert fake.calls == 1


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    assert Accelerators(gpus(0)).read() == []


def test_cpu_has_no_readings():
    assert {device.platform for device in local_devices()} == {'cpu'}
    assert Accelerators(local_devices()).read() == []


def test_tpus(monkeypatch):
    values = {'duty_cycle_pct': ['20.5', '30'], 'hbm_capacity_usage': ['1024', '2048']}

    def get_metric(name):
        if name not in values:
            raise RuntimeError(f'{name} is not supported')
        return types.SimpleNamespace(data=lambda: values[name])

    sdk = types.ModuleType('libtpu.sdk')
    sdk.tpumonitoring = types.SimpleNamespace(get_metric=get_metric)
    monkeypatch.setitem(sys.modules, 'libtpu', types.ModuleType('libtpu'))
    monkeypatch.setitem(sys.modules, 'libtpu.sdk', sdk)
    # A v3 chip has two cores.
    accelerators = Accelerators([LocalDevice('tpu', 'TPU v3', number) for number in range(4)])
    assert accelerators.read() == [
        {'index': 0, 'kind': 'TPU v3', 'use_percent': 20.5, 'memory_bytes': 1024.0},
        {'index': 1, 'kind': 'TPU v3', 'use_percent': 30.0, 'memory_bytes': 2048.0},
    ]
    # There are no values before the runtime starts.
    saved = dict(values)
    values.clear()
    assert accelerators.read() == []
    values.update(saved)
    assert len(accelerators.read()) == 2
