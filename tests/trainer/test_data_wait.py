"""Waits for data count only as far as the device had nothing to do; the test plays device and clock."""

import threading
import time

import pytest

from maxlm.telemetry.timeline import Timeline
from maxlm.trainer.step_runner import DataWait


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Step:
    """A step that is done when the test says so; like a `jax.Array` of its results."""

    def __init__(self, *, fails=False):
        self.done, self.fails = threading.Event(), fails

    def is_ready(self):
        return self.done.is_set()

    def block_until_ready(self):
        self.done.wait()
        if self.fails:
            raise RuntimeError('the step has failed')
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


def reading(clock, seconds, then=lambda: None):
    """A batch that takes so long to come, after which something happens."""
    clock.now += seconds
    then()
    yield 'batch'


def seen(wait, clock, step, *, before, after):
    """A batch during whose wait the step is done, and the thread that looks out for it sees that."""
    clock.now += before
    step.done.set()
    while wait._ready[0] is not step:
        time.sleep(0.001)
    clock.now += after
    yield 'batch'


def spent(timeline):
    found = timeline.read()
    return found['data_wait'], found['step']


def test_an_idle_device_waits_all_of_the_time(wait, clock, timeline):
    assert wait.next_batch(reading(clock, 3.0), None) == ('batch', 3.0)
    assert spent(timeline) == (3.0, 0.0)
    # Dispatched, but done before the batch was asked for.
    step = Step()
    step.done.set()
    assert wait.next_batch(reading(clock, 4.0), step) == ('batch', 4.0)
    assert spent(timeline) == (7.0, 0.0)


@pytest.mark.parametrize('late_before', [False, True])
def test_a_device_that_works_longer_than_the_batch_takes_loses_nothing(wait, clock, timeline, late_before):
    if late_before:
        wait.next_batch(reading(clock, 1.0), None)
    step = Step()
    assert wait.next_batch(reading(clock, 3.0), step) == ('batch', 3.0)
    assert spent(timeline) == (float(late_before), 3.0)
    step.done.set()


@pytest.mark.parametrize('fails', [False, True])
def test_while_batches_are_late_it_is_seen_when_the_device_has_nothing_to_do(wait, clock, timeline, fails):
    wait.next_batch(reading(clock, 1.0), None)
    for number in (1, 2):
        step = Step(fails=fails)
        assert wait.next_batch(seen(wait, clock, step, before=2.0, after=4.0), step) == ('batch', 6.0)
        assert spent(timeline) == (1.0 + number * 4.0, number * 2.0)


def test_the_first_batch_that_is_late_finds_a_step_like_those_before(wait, clock, timeline):
    for number in range(4):
        step = Step()
        wait.next_batch(reading(clock, 0.0), step)
        # The step before is waited for, with an evaluation once.
        clock.now += 2.0 if number else 50.0
        step.done.set()
    assert spent(timeline) == (0.0, 56.0)
    step = Step()
    assert wait.next_batch(reading(clock, 5.0, step.done.set), step) == ('batch', 5.0)
    assert spent(timeline) == (3.0, 58.0)
    # Nobody was woken until then.
    assert wait._ready == (None, 0.0)
    # A batch that comes sooner than the step would have ended has cost nothing.
    step = Step()
    wait.next_batch(seen(wait, clock, step, before=0.0, after=0.0), step)
    clock.now += 2.0
    step = Step()
    wait.next_batch(reading(clock, 1.0, step.done.set), step)
    assert spent(timeline) == (3.0, 61.0)


def test_what_reading_raises_is_raised_and_its_wait_counts(wait, clock, timeline):
    def damaged():
        clock.now += 3.0
        raise ValueError('damaged')
        yield

    step = Step()
    with pytest.raises(ValueError, match='damaged'):
        wait.next_batch(damaged(), step)
    # It is not known what the device did meanwhile, and the run ends.
    assert spent(timeline) == (3.0, 0.0)
    step.done.set()
