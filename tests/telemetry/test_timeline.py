"""Tests that exactly one time category is active, with a simulated clock, and the start time of a process."""

import contextlib
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from maxlm.telemetry.goodput import ACTIVITIES
from maxlm.telemetry.timeline import Timeline, process_start_time
from tests.clock import Clock


@pytest.fixture
def clock():
    return Clock()


def spent(timeline):
    return {name: pytest.approx(seconds) for name, seconds in timeline.read().items() if seconds > 1e-6}


def test_nested_phases_return_to_the_outer_phase(clock):
    timeline = Timeline(clock=clock)
    clock.advance(1)
    with timeline.phase('restore'):
        clock.advance(2)
    clock.advance(4)
    timeline.started()
    with timeline.phase('step'):
        clock.advance(8)
        with contextlib.suppress(KeyError), timeline.phase('evaluation'), timeline.phase('compile'):
            clock.advance(16)
            raise KeyError
        clock.advance(32)
        # The timeline can be read during a phase.
        assert spent(timeline)['step'] == 40
        clock.advance(64)
    clock.advance(128)
    assert spent(timeline) == {'start': 5, 'restore': 2, 'step': 104, 'compile': 16, 'other': 128}
    assert sum(timeline.read().values()) == pytest.approx(clock.now - timeline.origin)


def test_time_before_construction_is_startup(clock):
    start_time = time.time() - 7.0
    timeline = Timeline(start_time, clock=clock)
    assert timeline.start_time == start_time
    assert timeline.origin == pytest.approx(93.0, abs=0.1)
    assert timeline.read()['start'] == pytest.approx(7.0, abs=0.1)
    # A start time in the future is ignored.
    assert Timeline(time.time() + 100, clock=clock).read()['start'] == 0.0


def test_move_keeps_the_total(clock):
    timeline = Timeline(clock=clock)
    with timeline.phase('data_wait'):
        clock.advance(3)
    timeline.move(2, 'data_wait', 'step')
    assert spent(timeline) == {'data_wait': 1, 'step': 2}
    timeline.move(5, 'data_wait', 'step')
    timeline.move(-1, 'data_wait', 'step')
    timeline.move(1, 'step', 'step')
    assert spent(timeline) == {'step': 3}


def test_unknown_category_is_rejected(clock):
    with pytest.raises(AssertionError, match='evalation'), Timeline(clock=clock).phase('evalation'):
        pass


def test_compilation_is_tracked_in_every_phase():
    # Compile once first, so that the initialization of the compiler is not measured.
    jax.jit(lambda x: x + 1)(1.0)
    timeline = Timeline()
    timeline.started()
    with timeline.track_compilation(), timeline.phase('evaluation'):
        jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((8, 8))).block_until_ready()
        tracked = timeline.read()
        # Compilation in another thread does not count.
        thread = threading.Thread(target=lambda: jax.jit(lambda x: jnp.cos(x) @ x)(jnp.ones((9, 9))))
        thread.start()
        thread.join()
        assert timeline.read()['compile'] == tracked['compile'] > 0
    # Control: compilation outside of the block is not recorded.
    jax.jit(lambda x: jnp.tan(x) @ x)(jnp.ones((7, 7)))
    assert timeline.read()['compile'] == tracked['compile']
    assert min(timeline.read().values()) >= 0
    assert set(timeline.read()) == set(ACTIVITIES)


def test_process_start_time_precedes_imports():
    program = 'import time\ntime.sleep(0.2)\nfrom maxlm.telemetry import timeline\nprint(timeline.process_start_time())'
    before = time.time()
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    after = time.time()
    start_time = float(done.stdout)
    # The kernel's clock has ticks of 10 ms.
    assert before - 0.05 <= start_time < after
    assert after - start_time > 0.2
    assert process_start_time() < before
