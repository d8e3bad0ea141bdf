"""Tests forecasts from a config, a machine and a compiler: programs that fit, do not fit, or cannot be compiled."""

import dataclasses
import time

import jax
import pytest

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import InputError
from maxlm.hardware.chips import find_chip
from maxlm.planning import forecast
from maxlm.planning import machine as planning_machine
from maxlm.planning.estimate.cpu import Cpu
from maxlm.planning.estimate.roofline import Efficiency
from maxlm.planning.forecast import compile_ahead, compile_for, estimate, faster_dtype
from maxlm.planning.machine import Machine, machine_of, present_machine, usable_memory
from maxlm.planning.targets import parse_target
from maxlm.runtime.compilation_cache import CompilationCache
from tests.conftest import ROOT
from tests.small import small_config, small_layout


def machine(spec):
    target = parse_target(spec)
    return Machine(target, usable_memory(target.chip))


def resolved(spec, on, *overrides):
    target = on.target
    config = load(f'{ROOT}/configs/{spec}', list(overrides))
    return resolve(config, platform=target.chip.platform, num_devices=target.num_devices, vocab_size=50, windows=1)


def test_a_program_of_this_machine():
    config = small_config(num_devices=8, metrics__peak_tflops=1.0)
    this_machine = present_machine(config)
    found = compile_for(config, this_machine, small_layout(config))
    assert found.fits
    assert found.compiled is not None
    assert found.needed == found.compiled.total_bytes() + found.process
    assert found.process > 0
    # Control: the estimate differs and is marked as an estimate.
    estimated = estimate(config, this_machine)
    assert estimated.memory.is_estimate
    assert not found.memory.is_estimate
    assert estimated.memory.parameters == found.memory.parameters


OVERFLOW = (
    'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO '
    'temporaries (81.26G) exceeds available HBM (30.75G). HLO module: jit_train_step.'
)


def test_a_program_that_exceeds_the_memory(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(OVERFLOW)

    config = small_config(num_devices=8, metrics__peak_tflops=1.0)
    this_machine = present_machine(config)
    monkeypatch.setattr(forecast, 'compile_train_step', refuse)
    found = compile_for(config, this_machine, small_layout(config))
    assert not found.fits
    assert found.compiled is None
    assert found.needed == pytest.approx(81.26 * 2**30 + found.process)
    assert found.available <= 30.75 * 2**30
    assert found.memory.parameters == estimate(config, this_machine).memory.parameters

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError('INTERNAL: no such thing\nand more')

    monkeypatch.setattr(forecast, 'compile_train_step', fail)
    with pytest.raises(
        InputError, match=r'rejected the step; change the config or the target: INTERNAL: no such thing$'
    ):
        compile_for(config, this_machine, small_layout(config))


def test_the_host_memory_of_gpus_is_estimated(monkeypatch):
    def never(*_):
        raise AssertionError('compiled')

    monkeypatch.setattr(forecast, 'target_layout', never)
    gpus = machine('h100:8')
    for offload in ('optimizer', 'all'):
        found = compile_ahead(resolved('1b.py', gpus, f'mesh.host_offload={offload}'), gpus)
        assert found.memory.is_estimate
        assert found.memory.host > 0
    with pytest.raises(AssertionError, match='compiled'):
        compile_ahead(resolved('1b.py', gpus), gpus)


def test_larger_settings_are_slower():
    eight, nodes = machine('h100:8'), machine('h100:8x4')
    base = estimate(resolved('code.py:7b', eight), eight)
    assert estimate(resolved('code.py:13b', eight), eight).time.total > base.time.total
    more = estimate(resolved('code.py:7b', nodes), nodes)
    # Each device updates fewer parameters, so four nodes can be slightly more than four times as fast.
    assert base.time.total / 4.2 < more.time.total < base.time.total / 2


@pytest.mark.parametrize(('spec', 'name'), [('h100:1', 'bfloat16'), ('v4:2x2x1', 'bfloat16'), ('v100:1', 'float16')])
def test_a_faster_dtype_is_named(spec, name):
    on = machine(spec)
    slow = estimate(resolved('1b.py', on, 'model.dtype=float32'), on)
    dtype, seconds = faster_dtype(slow)
    assert dtype == name
    # The figure is that of a plan with the dtype.
    assert seconds == pytest.approx(estimate(resolved('1b.py', on, f'model.dtype={dtype}'), on).time.total)
    assert seconds < 0.9 * slow.time.total
    # TF32 has half of the bfloat16 rate, and float32 on a V100 an eighth of the float16 rate; TPUs have no such loss.
    kernel = f'model.attention={slow.config.model.attention}'
    compute = estimate(resolved('1b.py', on, f'model.dtype={dtype}', kernel), on).time.compute
    assert slow.time.compute == pytest.approx(compute * {'h100:1': 2, 'v4:2x2x1': 1, 'v100:1': 125 / 15.7}[spec])
    # Control: a config in a 16-bit dtype.
    assert faster_dtype(estimate(resolved('1b.py', on, f'model.dtype={dtype}'), on)) is None


def test_a_cpu_is_shared_by_its_devices():
    config = small_config()
    two, four = (machine_of(parse_target(f'cpu:{count}'), config) for count in (2, 4))
    assert two.available == pytest.approx(2 * four.available, rel=0.01)
    assert two.efficiency is not None
    assert two.target.chip.tflops > 0


def test_a_calibration_of_this_cpu_is_stored_for_a_day(tmp_path, monkeypatch):
    rates = iter((1e9, 2e9, 3e9))

    def calibrate(config):
        efficiency = Efficiency(products=0.5, attention=0.25, memory=1.0)
        chip = find_chip('NVIDIA H100 80GB HBM3')
        return Cpu(dataclasses.replace(chip, memory_bandwidth=next(rates), capability=None), efficiency)

    monkeypatch.setattr(planning_machine, 'calibrate_cpu', calibrate)
    cache = CompilationCache(tmp_path)

    def bandwidth(**settings):
        found = present_machine(small_config(**settings), cache=cache)
        assert found.efficiency == Efficiency(products=0.5, attention=0.25, memory=1.0)
        return found.target.chip.memory_bandwidth

    assert [bandwidth(), bandwidth()] == [1e9, 1e9]
    # Another config has operations of other sizes.
    assert bandwidth(model__dim=64) == 2e9
    later = time.time() + planning_machine.CALIBRATION_AGE
    monkeypatch.setattr(planning_machine.time, 'time', lambda: later)
    assert bandwidth() == 3e9
