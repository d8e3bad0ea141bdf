"""Tests CPU measurements: they are plausible and have the config's sizes. `benchmarks/plan_cpu.py` compares speeds."""

import pytest

from maxlm.planning.estimate import cpu
from maxlm.planning.estimate.cpu import calibrate_cpu, num_cores
from maxlm.planning.estimate.roofline import step_time
from maxlm.planning.estimate.work import estimate_work
from tests.small import small_config


def timed(config, machine):
    return step_time(
        estimate_work(config),
        machine.chip,
        num_devices=1,
        num_islands=1,
        mesh_sizes=config.mesh.sizes,
        dtype=config.model.dtype,
        efficiency=machine.efficiency,
    )


@pytest.fixture
def steady(monkeypatch):
    """Patches every measurement to take a millisecond, and returns the measured sizes."""
    sizes = []

    def measure(programs, rounds):
        sizes.extend([argument.shape for argument in program.arguments] for program in programs.values())
        return dict.fromkeys(programs, 1e-3)

    monkeypatch.setattr(cpu, '_measure', measure)
    monkeypatch.setattr(cpu, 'measure_matmul_tflops', lambda: 0.1)
    monkeypatch.setattr(cpu.jax, 'local_device_count', lambda: 1)
    return sizes


def test_products_take_their_measured_time(steady):
    config = small_config(model__family='llama')
    machine = calibrate_cpu(config)
    # Seven kernels in each of two layers and the logits take a millisecond each, and longer within a program.
    of = machine.efficiency._replace(attention=1e9)
    time = timed(config, machine._replace(efficiency=of))
    assert time.compute == pytest.approx(15e-3 / cpu.IN_PROGRAM, rel=0.15)
    assert [(128, 32), (32, 32), (128, 32)] in steady
    # Control: a machine with twice the peak has half the utilization, and the same time.
    assert machine.chip.tflops == 0.1


def test_modules_and_a_teacher_take_longer(steady):
    plain = small_config(model__family='llama')
    machine = calibrate_cpu(plain)
    modules = small_config(model__family='llama', model__mtp_depth=2)
    taught = small_config(model__family='llama', teacher=small_config(model__dim=64).model)
    assert calibrate_cpu(modules) == calibrate_cpu(taught) == machine
    assert timed(plain, machine).total < min(timed(modules, machine).total, timed(taught, machine).total)


def test_a_real_machine():
    config = small_config()
    machine = calibrate_cpu(config, rounds=1)
    assert machine.chip.platform == 'cpu'
    assert machine.chip.memory_bandwidth > 1e6
    assert num_cores() >= 1
    short, long = (timed(small_config(train__global_batch_size=rows), machine).total for rows in (8, 64))
    assert 0 < short < long < 8 * short
