"""Tests skipped steps, which of them count as divergence, and metrics over the steps since the previous line."""

import logging
import math

import pytest
from tqdm import tqdm

from maxlm.hardware.chips import Peak
from maxlm.log import logger
from maxlm.trainer.metric_logger import MetricLogger
from maxlm.trainer.throughput import Throughput
from maxlm.training.decisions.run_control import BadSteps
from maxlm.training.flops import TokenFlops
from tests.small import small_config

GOOD = {'loss': 1.0, 'grad_norm': 0.5, 'skipped': False}
DIVERGED = {'loss': math.nan, 'grad_norm': math.nan, 'skipped': True}
SPIKE = {'loss': 9.0, 'grad_norm': 40.0, 'skipped': True, 'spike': True}
OVERFLOW = {'loss': 1.0, 'grad_norm': math.inf, 'skipped': True, 'overflow': True}


class Lines(dict):
    """Stands for the writer of metrics.jsonl: the values of each line, by step."""

    def __bool__(self):
        return True

    def write(self, step, time, values):
        self[step] = values


def make_metric_logger(**settings):
    throughput = Throughput(
        tokens_per_step=1, flops=TokenFlops(causal=1, full=1), peak=Peak(1.0, 'by hand'), num_devices=1
    )
    throughput.start()
    return MetricLogger(
        small_config(**settings), throughput=throughput, bar=tqdm(disable=True), windows_per_epoch=1, sources=None
    )


@pytest.fixture
def metric_logger():
    # No step is logged with this interval.
    metric_logger = make_metric_logger(train__log_every=1000, train__num_steps=1000)
    metric_logger.begin(0, writer=None, skipped=3, best_loss=math.inf)
    return metric_logger


@pytest.fixture
def messages(monkeypatch):
    """Returns the logged (level, message) pairs, with single spaces."""
    found = []
    handler = logging.Handler()
    monkeypatch.setattr(
        handler, 'emit', lambda record: found.append((record.levelname, ' '.join(record.getMessage().split())))
    )
    monkeypatch.setattr(logger, 'handlers', [handler])
    monkeypatch.setattr(logger, 'level', logging.INFO)
    # The logger caches enabled levels.
    logger._cache.clear()
    return found


def skips_in_a_row(metric_logger, history):
    for step, metrics in enumerate(history, start=1):
        metric_logger.submit(step, {'param_norm': 1.0, **metrics}, data_wait=0.0)
    metric_logger.flush()
    return metric_logger.bad_steps.in_a_row


@pytest.mark.parametrize(
    ('history', 'in_a_row'),
    [
        ([DIVERGED, DIVERGED], 2),
        ([DIVERGED, GOOD, DIVERGED], 1),
        ([DIVERGED, GOOD], 0),
        ([OVERFLOW] * 30, 0),
        # An overflow neither counts nor resets the count.
        ([DIVERGED, OVERFLOW, DIVERGED], 2),
        ([OVERFLOW, {**DIVERGED, 'overflow': False}], 1),
        ([{**GOOD, 'overflow': False}, OVERFLOW], 0),
        ([SPIKE, DIVERGED, SPIKE], 3),
        ([SPIKE, GOOD, SPIKE], 1),
    ],
)
def test_overflows_do_not_count_as_divergence(metric_logger, history, in_a_row):
    assert skips_in_a_row(metric_logger, history) == in_a_row


def test_skipped_steps_are_counted_and_logged_by_reason(metric_logger, messages):
    skips_in_a_row(metric_logger, [OVERFLOW, GOOD, DIVERGED, SPIKE])
    assert messages == [
        ('INFO', 'step 1 skipped: its gradient overflowed; the loss scale is halved'),
        # The total includes three skipped steps of earlier attempts.
        ('WARNING', 'step 3 skipped: its loss or gradient is not finite (5 skipped so far)'),
        (
            'WARNING',
            'step 4 skipped: loss 9.0000 or gradient norm 40.000 is far above recent values (6 skipped so far)',
        ),
    ]


@pytest.mark.parametrize(
    ('history', 'expected'),
    [
        ([GOOD], BadSteps()),
        ([GOOD, DIVERGED, SPIKE], BadSteps(2, 3, 2)),
        ([DIVERGED, OVERFLOW, DIVERGED], BadSteps(1, 3, 2)),
        ([DIVERGED, GOOD, GOOD, DIVERGED], BadSteps(4, 4, 1)),
        ([DIVERGED, GOOD], BadSteps()),
    ],
)
def test_bad_steps_are_identified(metric_logger, history, expected):
    skips_in_a_row(metric_logger, history)
    assert metric_logger.bad_steps == expected


def test_bad_steps_are_reset_after_a_rollback(metric_logger):
    for step in (1, 2, 3):
        metric_logger.submit(step, DIVERGED, data_wait=0.0)
    assert metric_logger.bad_steps == BadSteps(1, 2, 2)
    metric_logger.begin(1, writer=None, skipped=3, best_loss=2.0)
    # Step 3 was in progress and no longer belongs to the run.
    metric_logger.flush()
    assert metric_logger.bad_steps == BadSteps()
    metric_logger.submit(2, DIVERGED, data_wait=0.0)
    metric_logger.flush()
    assert metric_logger.bad_steps == BadSteps(2, 2, 1)


@pytest.mark.parametrize(
    ('last', 'is_finite'),
    [
        ({}, True),
        ({'loss': math.nan, 'skipped': True}, False),
        ({'loss': math.inf, 'skipped': True}, False),
        # The update itself made the parameters not finite.
        ({'param_norm': math.nan}, False),
    ],
)
def test_is_finite_reflects_the_last_step(metric_logger, last, is_finite):
    skips_in_a_row(metric_logger, [{**DIVERGED}, {**GOOD, **last}])
    assert metric_logger.is_finite is is_finite


def submitted(metric_logger, first, history):
    for step, metrics in enumerate(history, start=first):
        metric_logger.submit(step, {'param_norm': 1.0, 'learning_rate': 0.1, **metrics}, data_wait=0.0)
    metric_logger.flush()


def maxima(values):
    names = ('loss', 'loss_max', 'grad_norm_max', 'newly_skipped_steps', 'skipped_steps')
    return tuple(values[f'train/{name}'] for name in names)


def test_maxima_over_the_steps_since_the_previous_line():
    metric_logger, lines = make_metric_logger(train__log_every=3, train__num_steps=8), Lines()
    metric_logger.begin(0, writer=lines, skipped=0, best_loss=math.inf)
    submitted(metric_logger, 1, [GOOD, SPIKE, GOOD, {**GOOD, 'loss': 2.0}, GOOD, GOOD, GOOD, {**GOOD, 'loss': 0.5}])
    # The last line is that of the last step, 8.
    assert {step: maxima(line) for step, line in lines.items()} == {
        3: (1, 9, 40, 1, 1),
        6: (1, 2, 0.5, 0, 1),
        8: (0.5, 1, 0.5, 0, 1),
    }


@pytest.mark.parametrize(
    ('bad', 'loss', 'grad_norm'),
    [
        (DIVERGED, math.nan, math.nan),
        (OVERFLOW, 1, math.inf),
        ({**GOOD, 'loss': math.inf, 'skipped': True}, math.inf, 0.5),
        # Negative control.
        (GOOD, 1, 0.5),
    ],
)
@pytest.mark.parametrize('position', [0, 1, 2])
def test_a_step_that_is_not_finite_does_not_vanish_in_the_maximum(bad, loss, grad_norm, position):
    metric_logger, lines = make_metric_logger(train__log_every=3, train__num_steps=6), Lines()
    metric_logger.begin(0, writer=lines, skipped=0, best_loss=math.inf)
    history = [GOOD] * 6
    history[position] = bad
    submitted(metric_logger, 1, history)
    values = [lines[3]['train/loss_max'], lines[3]['train/grad_norm_max'], lines[3]['train/newly_skipped_steps']]
    assert values == pytest.approx([loss, grad_norm, float(bad['skipped'])], nan_ok=True)
    assert maxima(lines[6])[1:4] == (1, 0.5, 0)


def test_a_rollback_or_resume_starts_a_new_interval():
    metric_logger, lines = make_metric_logger(train__log_every=4, train__num_steps=8), Lines()
    metric_logger.begin(0, writer=Lines(), skipped=0, best_loss=math.inf)
    submitted(metric_logger, 1, [GOOD, SPIKE, SPIKE])
    metric_logger.begin(2, writer=lines, skipped=1, best_loss=1.0)
    submitted(metric_logger, 3, [GOOD, {**GOOD, 'loss': 2.0}])
    assert maxima(lines[4]) == (2, 2, 0.5, 0, 1)


def test_update_metrics_are_written_if_the_step_has_them():
    for present in (True, False):
        metric_logger, lines = make_metric_logger(train__log_every=1, train__num_steps=8), Lines()
        metric_logger.begin(0, writer=lines, skipped=0, best_loss=math.inf)
        submitted(
            metric_logger, 1, [{**GOOD, **({'update_norm': 0.25, 'second_moment_ratio': 1.5} if present else {})}]
        )
        found = {name: value for name, value in lines[1].items() if 'update' in name or 'moment' in name}
        assert found == ({'train/update_norm': 0.25, 'train/second_moment_ratio': 1.5} if present else {})


def test_the_log_says_once_from_when_on_spikes_are_detected(metric_logger, messages):
    off, on = {**GOOD, 'window_steps': 15}, {**GOOD, 'window_steps': 16}
    line = ('INFO', 'step 3 the guard detects spikes from this step on (guard.spike_window)')
    submitted(metric_logger, 1, [off, off, on, on, off, on])
    assert messages == [line]
    # After a resume or rollback, too.
    metric_logger.begin(2, writer=None, skipped=0, best_loss=1.0)
    submitted(metric_logger, 3, [on, on])
    assert messages == [line, line]
    # Without a window, or before there are enough steps, nothing is said.
    metric_logger.begin(0, writer=None, skipped=0, best_loss=1.0)
    submitted(metric_logger, 1, [GOOD, off])
    assert messages == [line, line]
