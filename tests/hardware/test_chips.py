"""Tests the peak throughput used for MFU: configured, from the datasheet, measured, or reported as unknown."""

import contextlib
import types

import jax
import pytest

from maxlm.hardware import chips
from maxlm.hardware.chips import find_peak, measure_matmul_tflops
from maxlm.planning.gpu_targets import GPU_TARGETS


def peak_of(monkeypatch, kind, *, platform='gpu', configured=0.0, dtype='bfloat16'):
    device = types.SimpleNamespace(device_kind=kind, platform=platform)
    monkeypatch.setattr(chips.jax, 'local_devices', lambda: [device])
    return find_peak(configured, dtype)


@pytest.mark.parametrize(
    ('kind', 'tflops'),
    [
        ('NVIDIA H100 80GB HBM3', 989.4),
        ('NVIDIA H100 PCIe', 756.0),
        ('NVIDIA H200', 989.4),
        ('NVIDIA GH200 480GB', 989.4),
        ('NVIDIA B200', 2250.0),
        ('NVIDIA A100-SXM4-80GB', 312.0),
        ('NVIDIA A100 80GB PCIe', 312.0),
        ('NVIDIA A10G', 125.0),
        ('NVIDIA L4', 121.0),
        ('NVIDIA L40S', 362.0),
        ('TPU v2', 22.5),
        ('TPU v3', 61.5),
        ('TPU v4', 275.0),
        ('TPU v5 lite', 197.0),
        ('TPU v5', 459.0),
        ('TPU v5p', 459.0),
        ('TPU v6 lite', 918.0),
    ],
)
def test_datasheets(monkeypatch, kind, tflops):
    peak = peak_of(monkeypatch, kind)
    assert peak.tflops == tflops
    assert kind in peak.source
    assert 'datasheet' in peak.source


@pytest.mark.parametrize('kind', ['NVIDIA X9', 'NVIDIA H20', 'TPU v99', ''])
def test_unknown_device_has_no_peak_and_names_the_setting(monkeypatch, kind):
    peak = peak_of(monkeypatch, kind)
    assert peak.tflops == 0
    assert peak.source == f'unknown for {kind}; set metrics.peak_tflops'


@pytest.mark.parametrize(('kind', 'look_alike'), [('NVIDIA L40', 121.0), ('TPU v5e', 459.0), ('TPU v4 lite', 275.0)])
def test_devices_with_similar_names_are_distinguished(monkeypatch, kind, look_alike):
    assert peak_of(monkeypatch, kind).tflops != look_alike


def test_configured_peak_takes_precedence(monkeypatch):
    assert peak_of(monkeypatch, 'NVIDIA H100 80GB HBM3', configured=123.0) == (123.0, 'metrics.peak_tflops')
    assert peak_of(monkeypatch, 'NVIDIA X9', configured=123.0).tflops == 123


def test_a_cpu_is_measured_and_shared_by_its_virtual_devices(monkeypatch):
    monkeypatch.setattr(chips, 'measure_matmul_tflops', lambda: 4.0)
    peak = find_peak(0.0, 'float32')
    assert peak.tflops == 0.5
    assert 'measured' in peak.source


def test_the_measurement_is_of_a_plausible_size():
    assert 1e-4 < measure_matmul_tflops(size=128, rounds=2, products=2) < 1e3


def test_compute_capability():
    gpu = types.SimpleNamespace(platform='gpu', compute_capability='10.0')
    assert chips.capability_of(gpu) == (10, 0)
    assert chips.capability_of(types.SimpleNamespace(platform='gpu')) is None
    assert chips.capability_of(types.SimpleNamespace(platform='tpu', compute_capability='9.0')) is None
    known = {chip.name: chip for chip in chips.CHIPS}
    # The compiler and the planner use the same capabilities.
    assert {name: known[name].capability for name in GPU_TARGETS} == {
        n: gpu.capability for n, gpu in GPU_TARGETS.items()
    }
    # Ada and later have fp8, which is twice as fast. NVIDIA's datasheet of the H100 lists 1979 TFLOP/s.
    assert known['h100'].fp8_tflops == pytest.approx(1979, rel=1e-3)
    assert known['a100'].fp8_tflops == known['a100'].tflops
    assert {chip.capability is None for chip in chips.CHIPS if chip.platform == 'tpu'} == {True}


# Dense peaks in the datasheets of NVIDIA and Google. By default, JAX multiplies float32 in TF32 on GPUs since Ampere,
# and in one bfloat16 pass on TPUs.
PEAKS = [
    ('h100', 'bfloat16', None, 989.4, 'bfloat16'),
    ('h100', 'float16', None, 989.4, 'float16'),
    ('h100', 'float32', None, 494.7, 'TF32'),
    ('h100', 'float32', 'tensorfloat32', 494.7, 'TF32'),
    ('h100', 'float32', 'highest', 66.9, 'float32'),
    ('h100', 'bfloat16', 'highest', 989.4, 'bfloat16'),
    ('a100', 'float32', None, 156.0, 'TF32'),
    ('a100', 'float32', 'float32', 19.5, 'float32'),
    ('l4', 'float32', None, 60.5, 'TF32'),
    ('v100', 'float16', None, 125.0, 'float16'),
    ('v100', 'bfloat16', None, 15.7, 'float32'),
    ('v100', 'float32', None, 15.7, 'float32'),
    ('v4', 'bfloat16', None, 275.0, 'bfloat16'),
    ('v4', 'float32', None, 275.0, 'bfloat16'),
    ('v4', 'float32', 'high', 275.0 / 3, 'float32 in 3 bfloat16 passes'),
    ('v4', 'float32', 'highest', 275.0 / 6, 'float32 in 6 bfloat16 passes'),
]


@pytest.mark.parametrize(('name', 'dtype', 'precision', 'tflops', 'source'), PEAKS)
def test_peaks_of_dtypes(name, dtype, precision, tflops, source):
    chip = next(chip for chip in chips.CHIPS if chip.name == name)
    with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
        assert chip.peak(dtype) == (pytest.approx(tflops), source)


def test_mfu_of_a_float32_run_divides_by_the_peak_of_its_products(monkeypatch):
    found = peak_of(monkeypatch, 'NVIDIA H100 80GB HBM3', dtype='float32')
    assert found == (494.7, 'NVIDIA H100 80GB HBM3, TF32 datasheet')
    # All GPUs have a float32 peak.
    assert all(chip.float32_tflops > 0 for chip in chips.CHIPS if chip.platform == 'gpu')
