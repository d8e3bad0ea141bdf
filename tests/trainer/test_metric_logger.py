"""Tests skipped steps, and which of them count as divergence."""

import logging
import math

import pytest
from tqdm import tqdm

from maxlm.hardware.chips import Peak
from maxlm.log import logger
from maxlm.planning.estimate.flops import TokenFlops
from maxlm.trainer.metric_logger import Reporter
from maxlm.trainer.throughput import Throughput
from maxlm.training.run_control import BadSteps
from tests.small import small_config

GOOD = {'loss': 1.0, 'skipped': False}
DIVERGED = {'loss': math.nan, 'skipped': True}
SPIKE = {'loss': 9.0, 'grad_norm': 40.0, 'skipped': True, 'spike': True}
OVERFLOW = {'loss': 1.0, 'skipped': True, 'overflow': True}


@pytest.fixture
def reporter():
    throughput = Throughput(
        tokens_per_step=1, flops=TokenFlops(causal=1, full=1), peak=Peak(1.0, 'by hand'), num_devices=1
    )
    reporter = Reporter(
        # No step is logged with this interval.
        small_config(train__log_every=1000, train__num_steps=1000),
        throughput=throughput,
        bar=tqdm(disable=True),
        windows_per_epoch=1,
        sources=None,
    )
    reporter.begin(0, writer=None, skipped=3, best_loss=math.inf)
    return reporter


def skips_in_a_row(reporter, history):
    for step, metrics in enumerate(history, start=1):
        reporter.submit(step, {'param_norm': 1.0, **metrics}, data_wait=0.0)
    reporter.flush()
    return reporter.bad_steps.in_a_row


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
def test_overflows_do_not_count_as_divergence(reporter, history, in_a_row):
    assert skips_in_a_row(reporter, history) == in_a_row


def test_skipped_steps_are_counted_and_logged_by_reason(reporter, monkeypatch):
    records = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, 'emit', records.append)
    monkeypatch.setattr(logger, 'handlers', [handler])
    monkeypatch.setattr(logger, 'level', logging.INFO)
    # The logger caches enabled levels.
    logger._cache.clear()
    skips_in_a_row(reporter, [OVERFLOW, GOOD, DIVERGED, SPIKE])
    messages = [(record.levelname, ' '.join(record.getMessage().split())) for record in records]
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
def test_bad_steps_are_identified(reporter, history, expected):
    skips_in_a_row(reporter, history)
    assert reporter.bad_steps == expected


def test_bad_steps_are_reset_after_a_rollback(reporter):
    for step in (1, 2, 3):
        reporter.submit(step, DIVERGED, data_wait=0.0)
    assert reporter.bad_steps == BadSteps(1, 2, 2)
    reporter.begin(1, writer=None, skipped=3, best_loss=2.0)
    # Step 3 was in progress and no longer belongs to the run.
    reporter.flush()
    assert reporter.bad_steps == BadSteps()
    reporter.submit(2, DIVERGED, data_wait=0.0)
    reporter.flush()
    assert reporter.bad_steps == BadSteps(2, 2, 1)


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
def test_is_finite_reflects_the_last_step(reporter, last, is_finite):
    skips_in_a_row(reporter, [{**DIVERGED}, {**GOOD, **last}])
    assert reporter.is_finite is is_finite
