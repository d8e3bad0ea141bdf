"""Tests the driver check on fake machines, with the faults that drivers report."""

import sys
import types

import pytest

from maxlm.diagnostics.checks.drivers import check_gpus, evaluate_driver, evaluate_gpus
from maxlm.diagnostics.result import CheckStatus
from maxlm.hardware import detect
from maxlm.hardware.detect import read_hardware
from maxlm.hardware.nvml import Nvidia, NvidiaError, read_nvidia
from maxlm.installation import pip_install
from tests.diagnostics.machines import CPU, DRIVERLESS, GIB, H100, TPU, NVMLError, case_on, fake_nvml, gpus

CUDA12, CUDA13 = {'jax-cuda12-plugin'}, {'jax-cuda13-plugin'}


@pytest.mark.parametrize(
    ('machine', 'installed', 'status', 'words'),
    [
        (CPU, (), 'ok', 'no GPU or TPU'),
        (TPU, {'libtpu'}, 'ok', 'libtpu is installed'),
        (TPU, CUDA12, 'failure', pip_install('tpu')),
        (DRIVERLESS, CUDA12, 'failure', '2 NVIDIA GPUs on the PCI bus, but the driver does not respond (Driver Not'),
        (gpus(), CUDA13, 'ok', '2 × NVIDIA H100 80GB HBM3, driver 580.65.6 (CUDA 13.0), jax-cuda13-plugin'),
        (gpus(driver=(525, 60, 13)), CUDA12, 'ok', 'driver 525.60.13'),
        (gpus(), (), 'failure', pip_install('cuda13')),
        (gpus(driver=(550, 54)), (), 'failure', pip_install('cuda12')),
        (gpus(driver=(550, 54)), CUDA13, 'failure', 'jax-cuda13-plugin requires 580.65.6 or later'),
        (gpus(driver=(470, 1)), CUDA12, 'failure', 'too old for JAX'),
        (gpus(), CUDA12 | CUDA13, 'warning', 'pip uninstall jax-cuda12-plugin jax-cuda12-pjrt'),
    ],
)
def test_driver(machine, installed, status, words):
    found = evaluate_driver(machine, lambda package: package in installed)
    assert found.status == status
    assert words in f'{found.message} {found.remedy}'


@pytest.mark.parametrize(
    ('gpu', 'status', 'words'),
    [
        (H100, 'ok', '2 × NVIDIA H100 80GB HBM3: no memory errors, not throttled, no other processes'),
        (H100._replace(ecc_errors=3), 'failure', 'GPU 1: 3 uncorrected memory errors'),
        (H100._replace(remap_failed=True), 'failure', 'GPU 1: faulty memory could not be remapped'),
        (H100._replace(remap_pending=True), 'warning', 'GPU 1: faulty memory will be remapped after a reset'),
        (H100._replace(throttled=('thermal',)), 'warning', 'GPU 1: throttled (thermal)'),
        (H100._replace(processes=(17,), used=40 * GIB), 'warning', 'GPU 1: used by process 17 (40.0 GiB)'),
        (H100._replace(used=40 * GIB), 'warning', 'GPU 1: 40.0 GiB are used by processes that are not visible'),
        (
            H100._replace(name='NVIDIA A100'),
            'warning',
            'GPUs of several kinds: 1 × NVIDIA H100 80GB HBM3, 1 × NVIDIA A',
        ),
    ],
)
def test_gpus(gpu, status, words):
    found = evaluate_gpus(Nvidia((580,), (13, 0), (H100, gpu)), None)
    assert found.status == status
    assert words in found.message


@pytest.mark.parametrize(
    ('visible', 'status'),
    [(None, 'warning'), ('0', 'ok'), ('0,1', 'warning'), ('GPU-1', 'ok'), ('GPU-2', 'warning'), ('MIG-7', 'warning')],
)
def test_only_visible_gpus_count(visible, status):
    busy = H100._replace(uuid='GPU-2', processes=(17,))
    assert evaluate_gpus(Nvidia((580,), (13, 0), (H100, busy)), visible).status == status


def test_gpus_without_a_driver_are_skipped():
    assert check_gpus(case_on(DRIVERLESS)).status is CheckStatus.SKIPPED
    assert check_gpus(case_on(gpus())).status is CheckStatus.OK
    # None is shown.
    assert 'none visible to a run' in check_gpus(case_on(gpus(), environment={'CUDA_VISIBLE_DEVICES': ''})).message


@pytest.fixture
def nvml(monkeypatch):
    return lambda **changes: monkeypatch.setitem(sys.modules, 'pynvml', fake_nvml(**changes))


def test_driver_reports_are_read(nvml):
    closed = []
    nvml(
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetTotalEccErrors=lambda gpu, kind, counter: 2,
        nvmlDeviceGetRemappedRows=lambda gpu: (0, 1, 1, 0),
        # Idle, power cap, hardware thermal slowdown.
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x01 | 0x04 | 0x40,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [types.SimpleNamespace(pid=7)],
    )
    description = read_nvidia()
    assert (description.driver, description.cuda) == ((570, 124, 6), (12, 8))
    (gpu,) = description.gpus
    assert gpu == H100._replace(
        used=GIB, ecc_errors=2, remap_pending=True, remap_failed=False, throttled=('hardware thermal',), processes=(7,)
    )
    assert closed == [True]


def test_fields_that_the_driver_does_not_report_are_none(nvml):
    nvml(
        **dict.fromkeys(
            (
                'nvmlDeviceGetMemoryInfo',
                'nvmlDeviceGetRemappedRows',
                'nvmlDeviceGetTotalEccErrors',
                'nvmlDeviceGetCurrentClocksThrottleReasons',
                'nvmlDeviceGetComputeRunningProcesses',
            )
        )
    )
    (gpu,) = read_nvidia().gpus
    assert (gpu.memory, gpu.ecc_errors, gpu.remap_pending, gpu.throttled, gpu.processes) == (None, None, None, (), ())
    assert evaluate_gpus(read_nvidia(), None).status is CheckStatus.OK


def broken():
    raise NVMLError('Driver Not Loaded')


def test_a_driver_that_does_not_respond(nvml):
    nvml(nvmlInit=broken)
    with pytest.raises(NvidiaError, match='Driver Not Loaded'):
        read_nvidia()


def bus(folder, *devices):
    for number, (vendor, device, kind) in enumerate(devices):
        place = folder / f'0000:00:0{number}.0'
        place.mkdir(parents=True)
        for name, value in (('vendor', vendor), ('device', device), ('class', kind)):
            (place / name).write_text(f'{value}\n')
    return folder


def test_cards_on_the_bus_are_found_without_a_driver(tmp_path, nvml, monkeypatch):
    nvml(nvmlInit=broken)
    monkeypatch.setattr(detect.glob, 'glob', lambda pattern: [])
    sound_card = ('0x10de', '0x22a3', '0x040300')
    cards = bus(tmp_path / 'a', ('0x10de', '0x2330', '0x030200'), sound_card, ('0x1ae0', '0x001f', '0x010000'))
    hardware = read_hardware(cards)
    assert (hardware.nvidia_cards, hardware.tpu_chips, hardware.platform) == (1, 0, 'gpu')
    assert hardware.problem == 'Driver Not Loaded'
    chips = read_hardware(bus(tmp_path / 'b', *[('0x1ae0', '0x0063', '0x120000')] * 4))
    assert (chips.platform, chips.description) == ('tpu', '4 TPU chips')
    assert read_hardware(tmp_path / 'none').platform == 'cpu'


def test_driver_reports_replace_the_bus_listing(tmp_path, nvml, monkeypatch):
    monkeypatch.setattr(detect.glob, 'glob', lambda pattern: [])
    nvml()
    hardware = read_hardware(tmp_path)
    assert (hardware.platform, hardware.description) == ('gpu', '1 × NVIDIA H100 80GB HBM3')
