"""Tests throughput with a simulated clock."""

import types

import pytest

from maxlm.hardware.chips import Peak
from maxlm.trainer import throughput as throughput_module
from maxlm.trainer.throughput import Throughput
from maxlm.training.flops import TokenFlops
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput_module, 'time', types.SimpleNamespace(perf_counter=clock))
    return clock


def make_throughput(tflops=2.0, num_devices=4):
    flops = TokenFlops(causal=1e9, full=1.5e9)
    return Throughput(tokens_per_step=1000, flops=flops, peak=Peak(tflops, 'by hand'), num_devices=num_devices)


def step(throughput, clock, seconds, data_wait=0.0):
    clock.now += seconds
    throughput.step_done(data_wait)


def test_tokens_and_seconds(clock):
    throughput = make_throughput()
    # Compilation before the first step does not count.
    clock.now += 60
    throughput.start()
    step(throughput, clock, 0.25, data_wait=0.125)
    step(throughput, clock, 0.75)
    metrics = throughput.read_interval()
    assert metrics['perf/tokens_per_second'] == 2000
    assert metrics['perf/step_time_seconds'] == 0.5
    assert metrics['perf/data_loading_seconds'] == 0.0625


def test_mfu(clock):
    throughput = make_throughput()
    throughput.start()
    step(throughput, clock, 0.5)
    metrics = throughput.read_interval()
    # 2000 tokens/s · 1 GFLOP = 2 TFLOP/s of 4 devices with 2 TFLOP/s each.
    assert metrics['perf/mfu'] == pytest.approx(0.25)
    assert metrics['perf/mfu_full'] == pytest.approx(0.375)


def test_exceeded_peak_disables_mfu(clock):
    throughput = make_throughput()
    throughput.start()
    step(throughput, clock, 0.1)
    assert 'perf/mfu' not in throughput.read_interval()
    # The peak stays invalid when steps become slower.
    step(throughput, clock, 0.5)
    assert not {'perf/mfu', 'perf/mfu_full'} & {*throughput.read_interval(), *throughput.read_total()}


def test_no_mfu_without_a_peak(clock):
    throughput = make_throughput(tflops=0.0)
    throughput.start()
    step(throughput, clock, 0.5)
    assert set(throughput.read_interval()) == {
        'perf/tokens_per_second',
        'perf/step_time_seconds',
        'perf/data_loading_seconds',
    }


def test_pauses_do_not_count(clock):
    throughput = make_throughput()
    throughput.start()
    step(throughput, clock, 0.5)
    clock.now += 0.125
    with throughput.paused('eval'):
        clock.now += 1000
    for seconds in (1, 2):
        with throughput.paused('save'):
            clock.now += seconds
    step(throughput, clock, 0.375)
    metrics = throughput.read_interval()
    assert metrics['perf/step_time_seconds'] == 0.5
    assert metrics['perf/eval_seconds'] == 1000
    assert metrics['perf/checkpoint_blocked_seconds'] == 3
    # Negative control: the same time outside of a pause counts.
    clock.now += 1000
    step(throughput, clock, 0.5)
    metrics = throughput.read_interval()
    assert metrics['perf/step_time_seconds'] == 1000.5
    assert 'perf/eval_seconds' not in metrics
    assert throughput.read_total()['perf/checkpoint_blocked_seconds'] == 3


def test_intervals_and_the_total(clock):
    throughput = make_throughput()
    throughput.start()
    assert throughput.read_interval() == {}
    assert throughput.read_total() == {}
    step(throughput, clock, 1.0)
    assert throughput.read_interval()['perf/step_time_seconds'] == 1.0
    assert throughput.read_interval() == {}
    step(throughput, clock, 3.0)
    assert throughput.read_interval()['perf/step_time_seconds'] == 3.0
    assert throughput.read_total()['perf/step_time_seconds'] == 2.0
    assert throughput.read_total()['perf/tokens_per_second'] == 500
