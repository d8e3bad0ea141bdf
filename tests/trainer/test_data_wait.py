"""Tests that waits for data count only while the device is idle. Device and clock are simulated."""

import threading
import time

import pytest

from maxlm.telemetry.timeline import Timeline
from maxlm.trainer.step_runner import DataWait
from tests.clock import Clock


class Step:
    """Fake of a step's `jax.Array`, which becomes ready when the test sets `done`."""

    def __init__(self, *, fails=False):
        self.done, self.fails = threading.Event(), fails

    def is_ready(self):
        return self.done.is_set()

    def block_until_ready(self):
        self.done.wait()
        if self.fails:
            raise RuntimeError('the step failed')
        return self


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline(clock):
    timeline = Timeline(clock=clock)
    timeline.started()
    return timeline


@pytest.fixture
def wait(timeline):
    with DataWait(timeline) as wait, timeline.phase('step'):
        yield wait


def read_batch(clock, seconds, callback=lambda: None):
    """Yields a batch that takes `seconds` and then calls `callback`."""
    clock.now += seconds
    callback()
    yield 'batch'


def read_during_step(wait, clock, step, *, before, after):
    """Yields a batch; the step finishes during the wait, and the watching thread detects it."""
    clock.now += before
    step.done.set()
    while wait._ready[0] is not step:
        time.sleep(0.001)
    clock.now += after
    yield 'batch'


def spent(timeline):
    found = timeline.read()
    return found['data_wait'], found['step']


def test_wait_counts_fully_while_the_device_is_idle(wait, clock, timeline):
    assert wait.next_batch(read_batch(clock, 3.0), None) == ('batch', 3.0)
    assert spent(timeline) == (3.0, 0.0)
    # The step was dispatched, but finished before the batch was requested.
    step = Step()
    step.done.set()
    assert wait.next_batch(read_batch(clock, 4.0), step) == ('batch', 4.0)
    assert spent(timeline) == (7.0, 0.0)


@pytest.mark.parametrize('late_before', [False, True])
def test_wait_does_not_count_while_the_device_is_busy(wait, clock, timeline, late_before):
    if late_before:
        wait.next_batch(read_batch(clock, 1.0), None)
    step = Step()
    assert wait.next_batch(read_batch(clock, 3.0), step) == ('batch', 3.0)
    assert spent(timeline) == (float(late_before), 3.0)
    step.done.set()


@pytest.mark.parametrize('fails', [False, True])
def test_late_batches_count_from_the_end_of_the_step(wait, clock, timeline, fails):
    wait.next_batch(read_batch(clock, 1.0), None)
    for number in (1, 2):
        step = Step(fails=fails)
        assert wait.next_batch(read_during_step(wait, clock, step, before=2.0, after=4.0), step) == ('batch', 6.0)
        assert spent(timeline) == (1.0 + number * 4.0, number * 2.0)


def test_first_late_batch_assumes_the_usual_step_time(wait, clock, timeline):
    for number in range(4):
        step = Step()
        wait.next_batch(read_batch(clock, 0.0), step)
        # The loop waits for the previous step; the first time it also evaluates.
        clock.now += 2.0 if number else 50.0
        step.done.set()
    assert spent(timeline) == (0.0, 56.0)
    step = Step()
    assert wait.next_batch(read_batch(clock, 5.0, step.done.set), step) == ('batch', 5.0)
    assert spent(timeline) == (3.0, 58.0)
    # The watching thread was not woken until then.
    assert wait._ready == (None, 0.0)
    # No time counts if the batch arrives before the step ends.
    step = Step()
    wait.next_batch(read_during_step(wait, clock, step, before=0.0, after=0.0), step)
    clock.now += 2.0
    step = Step()
    wait.next_batch(read_batch(clock, 1.0, step.done.set), step)
    assert spent(timeline) == (3.0, 61.0)


def test_reading_error_is_raised_and_its_wait_counts(wait, clock, timeline):
    def damaged():
        clock.now += 3.0
        raise ValueError('damaged')
        yield

    step = Step()
    with pytest.raises(ValueError, match='damaged'):
        wait.next_batch(damaged(), step)
    # The state of the device during this time is unknown, and the run ends.
    assert spent(timeline) == (3.0, 0.0)
    step.done.set()
