"""Replays with flipped bits: which are found, what is recorded, and which state the run continues from."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks.replay_faults import COLLECTIVE, MEMORY, NONE, TRAINED, WITHIN, Model, matter
from maxlm.errors import EXIT_DEVICE, EXIT_PREEMPTED, DeviceError
from maxlm.training.batch import HOLD
from maxlm.training.decisions.replay import ROUNDING
from maxlm.training.decisions.run_control import BadSteps
from maxlm.training.spike_guard import SpikeStatistics
from tests.conftest import ROOT

RESULTS = ROOT / 'benchmarks/results/replay_faults_cpu2.json'
# The sign of an element, the highest bit of its exponent, and a bit of its mantissa. Rounding may remove lower ones.
BITS = (31, 30, 12)
STEP = TRAINED + 1


@pytest.fixture(scope='module')
def single():
    return Model()


@pytest.fixture(scope='module')
def double():
    return Model(2, **COLLECTIVE)


@pytest.fixture
def events(single, monkeypatch):
    recorded = []
    recorder = SimpleNamespace(
        timeline=single.replays._recorder.timeline, record_event=lambda *args, **extra: recorded.append(extra)
    )
    monkeypatch.setattr(single.replays, '_recorder', recorder)
    return recorded


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize('execution', [0, 1])
@pytest.mark.parametrize('place', WITHIN[1:])
def test_a_flip_in_one_execution_is_found(single, double, place, execution):
    model = double if place == 'collective' else single
    for bit in BITS:
        # The last array; those of the embedding have rows that the batch does not read.
        fault = np.array([WITHIN.index(place), model.num_arrays(place) - 1, 5, bit], np.uint32)
        assert model.flip_within(fault, execution=execution).found, bit


def test_flips_matter_by_their_bit(single):
    """A flip of an exponent changes the loss, and that of the lowest bit does not."""
    fault = np.array([WITHIN.index('activations'), 0, 5, 30], np.uint32)
    assert single.flip_within(fault).matters
    fault[3] = 0
    assert not single.flip_within(fault).matters
    assert matter((1.0, np.nan), (1.0, 1.0))


def test_a_replayed_step_equals_a_step_that_is_not_replayed(single):
    replays = single.replays
    replays.begin(TRAINED)
    count = replays.metrics['replay/steps']
    found, _ = replays.step(STEP, single.program, single.copy(), lambda: single.put(0))
    expected, _ = single.program(single.copy(), {**single.put(0), HOLD: single.go})
    assert same(found, expected)
    assert replays.metrics['replay/steps'] == count + 1
    # Without a fault, two consecutive steps agree.
    replays.step(STEP + 1, single.program, found, lambda: single.put(1))


@pytest.mark.parametrize('seed', range(4))
def test_a_flip_in_memory_is_found_before_the_next_step(single, seed):
    assert single.flip_memory(np.random.default_rng(seed)).found


def test_a_flip_in_memory_is_not_found_if_the_step_before_was_not_replayed(single):
    """Negative control: both executions read the same wrong value."""
    single.replays.begin(TRAINED)
    state = single.copy()
    kernel = state.params['embedding']
    state.params['embedding'] = jax.device_put(np.array(kernel) + 1, kernel.sharding)
    single.replays.step(STEP, single.program, state, lambda: single.put(0))


def run_twice(model, *faults):
    """Replays a step whose executions have faults; returns the DeviceError or None."""
    given = [*faults]
    model.replays.begin(TRAINED)
    try:
        model.replays.step(STEP, model.program, model.copy(), lambda: model.put(0, given.pop(0)))
    except DeviceError as error:
        return error
    return None


def flip_of(bit):
    return np.array([WITHIN.index('activations'), 1, 5, bit], np.uint32)


def test_the_message_names_step_values_host_and_checkpoints(single, events, monkeypatch):
    monkeypatch.setattr(single.replays, '_saved_steps', lambda: [10, TRAINED])
    error = run_twice(single, flip_of(29), NONE)
    text = str(error)
    assert text.startswith(f'step {STEP} computed twice: the results differ, so a device computed one of them wrongly')
    assert 'on device 0' in text
    assert f'checkpoints after step {TRAINED}, the first one of this attempt, may be damaged too (there are' in text
    assert [(event['step'], event['cause']) for event in events] == [(STEP, 'device')]
    assert events[0]['loss'] != events[0]['replayed_loss']
    # With several processes nobody knows which one computed wrongly.
    assert (error.code_of(0, 1), error.code_of(0, 2)) == (EXIT_DEVICE, EXIT_PREEMPTED)


def test_a_memory_error_names_the_process_and_checkpoints(single, monkeypatch):
    monkeypatch.setattr(single.replays, '_saved_steps', lambda: [10, STEP, STEP + 1])
    single.replays.begin(TRAINED)
    state, _ = single.replays.step(STEP, single.program, single.copy(), lambda: single.put(0))
    kernel = state.params['embedding']
    state.params['embedding'] = jax.device_put(np.array(kernel) * 2, kernel.sharding)
    with pytest.raises(DeviceError, match=r'1 of \d+ arrays differ \(params.embedding\) on device 0') as raised:
        single.replays.step(STEP + 1, single.program, state, lambda: single.put(1))
    assert raised.value.code_of(0, 2) == EXIT_DEVICE
    assert f'after step {STEP}, the last one with two equal results, may be damaged too (there are none)' in str(
        raised.value
    )


def test_devices_that_are_not_deterministic_may_differ_by_rounding(single, events, monkeypatch, caplog):
    monkeypatch.setattr(single.replays, '_is_deterministic', False)
    monkeypatch.setattr(single.replays, '_num_different', 0)
    # On some processors, sums lose a change of the lowest bits.
    assert run_twice(single, flip_of(6), NONE) is None
    assert run_twice(single, flip_of(7), NONE) is None
    # Only the first difference is an event.
    assert [event['cause'] for event in events] == ['nondeterminism']
    assert single.replays.metrics['replay/differences'] == 2
    assert caplog.text.count('differ by rounding') == 1
    # Negative control: a large difference.
    assert run_twice(single, flip_of(30), NONE)


class FakeMetricLogger:
    """Fake of the metric logger: reads the metrics of the last step, and counts bad steps."""

    def __init__(self):
        self.bad_steps, self.pending, self.step = BadSteps(), None, TRAINED

    @property
    def running(self):
        return self.pending

    def flush(self):
        if self.pending is None:
            return
        self.step += 1
        bad, first, self.pending = bool(self.pending['bad']), self.bad_steps.first or self.step, None
        self.bad_steps = BadSteps(first, self.step, self.bad_steps.in_a_row + 1) if bad else BadSteps()


class Run:
    """Steps without scheduled replays. `wrong` are the executions, counted from 0, with a wrong value in the batch."""

    def __init__(self, model, monkeypatch, *, bad=(), wrong=(), settles=False):
        monkeypatch.setattr(model.replays, '_config', self.without_replays(model.config))
        metric_logger = FakeMetricLogger()
        monkeypatch.setattr(model.replays, '_metric_logger', metric_logger)
        self.executed = []
        model.replays.begin(TRAINED)
        self.state = model.copy()
        for step in range(STEP, STEP + 6):

            def make_batch(step=step):
                self.executed.append(step - TRAINED)
                is_wrong = step - TRAINED in bad or len(self.executed) - 1 in wrong
                batch = model.put(step)
                if is_wrong:
                    batch['weights'] = jax.device_put(np.full((8, 16), np.nan, np.float32), batch['weights'].sharding)
                return batch

            self.state, metrics = model.replays.step(step, model.program, self.state, make_batch)
            metric_logger.flush()
            metric_logger.pending = metrics
            if settles:
                self.state = model.replays.settle(self.state)
        self.state = model.replays.settle(self.state)

    @staticmethod
    def without_replays(config):
        return dataclasses.replace(config, guard=dataclasses.replace(config.guard, replay_fraction=0.0))


@pytest.mark.parametrize(
    ('bad', 'settles', 'executed'),
    [
        ((), False, [1, 2, 3, 4, 5, 6]),
        # Step 3 is held, step 2 is replayed, and step 3 is dispatched again.
        ((2,), False, [1, 2, 3, 2, 3, 4, 5, 6]),
        # Nothing is held if the metrics are read before the next step.
        ((2,), True, [1, 2, 2, 3, 4, 5, 6]),
        # Only the first of several bad steps is replayed.
        ((2, 3, 4), False, [1, 2, 3, 2, 3, 4, 5, 6]),
        ((2, 4), False, [1, 2, 3, 2, 3, 4, 5, 4, 5, 6]),
        # The last step of a run.
        ((6,), False, [1, 2, 3, 4, 5, 6, 6]),
    ],
)
def test_the_first_bad_step_is_replayed(single, events, monkeypatch, bad, settles, executed):
    run = Run(single, monkeypatch, bad=bad, settles=settles)
    assert run.executed == executed
    firsts = [step for step in bad if step - 1 not in bad]
    assert [(event['step'] - TRAINED, event['cause']) for event in events] == [(step, 'data') for step in firsts]
    if events:
        assert json.dumps(events[0])
        assert events[0]['loss'] == events[0]['replayed_loss'] == 'nan'
    # The state is that of a run that skips the bad steps without replays.
    state = single.copy()
    for step in range(STEP, STEP + 6):
        batch = single.put(step)
        if step - TRAINED in bad:
            batch['weights'] = jax.device_put(np.full((8, 16), np.nan, np.float32), batch['weights'].sharding)
        state, _ = single.program(state, {**batch, HOLD: single.go})
    assert same(run.state, state)


@pytest.mark.parametrize('step', [1, 2, 6])
def test_a_bad_step_that_is_good_in_its_replay_is_the_fault_of_a_device(single, events, monkeypatch, step):
    with pytest.raises(DeviceError, match=f'step {TRAINED + step} computed twice'):
        Run(single, monkeypatch, wrong=(step - 1,))
    assert [event['cause'] for event in events] == ['device']


def test_a_spike_halves_the_window_once(monkeypatch):
    """A spike also changes a window that is not full, so the replay needs the window before the step."""
    young = Model(guard__spike_window=64)
    monkeypatch.setattr(young.replays, '_config', Run.without_replays(young.config))
    metric_logger = FakeMetricLogger()
    monkeypatch.setattr(young.replays, '_metric_logger', metric_logger)
    young.replays.begin(TRAINED)

    def put(like, value):
        return jax.device_put(np.full(like.shape, value, like.dtype), like.sharding)

    def first():
        # Losses and gradient norms are far below those of the next steps.
        good_QW, filled = young.state.spike_window
        return young.copy()._replace(spike_window=SpikeStatistics(put(good_QW, -9.0), put(filled, 33)))

    found = expected = None
    for step in (STEP, STEP + 1):
        found, metric_logger.pending = young.replays.step(step, young.program, found or first(), lambda: young.put(0))
        expected, metrics = young.program(expected or first(), {**young.put(0), HOLD: young.go})
        assert metrics['spike']
    assert same(young.replays.settle(found), expected)
    assert young.replays.metrics == {'replay/steps': 1, 'replay/differences': 0, 'replay/loss_difference': 0}
    # Each of the two steps halved the window, and the replay of the first did not.
    assert int(expected.spike_window.filled) == 33 // 2 // 2


def test_results_of_the_benchmark():
    result = json.loads(RESULTS.read_text())
    for dtype, places in result['flips'].items():
        assert set(places) == {*WITHIN[1:], MEMORY}
        for place, counts in places.items():
            assert counts['matter'] > 0, (dtype, place)
            assert counts['matter_found'] >= 0.99 * counts['matter'], (dtype, place)
    assert result['cost']['share'] < 0.01
    for dtype, limits in ROUNDING.items():
        assert all(getattr(limits, name) >= 20 * value for name, value in result['rounding'][dtype].items())
