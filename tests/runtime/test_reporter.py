"""Steps that were left out: which of them speak of a run that diverges."""

import logging
import math

import pytest
from tqdm import tqdm

from maxlm.planning.chips import Peak
from maxlm.planning.flops import TokenFlops
from maxlm.runtime.console import logger
from maxlm.runtime.pace import Pace
from maxlm.runtime.reporter import Reporter
from tests.small import small_config

GOOD = {'loss': 1.0, 'skipped': False}
DIVERGED = {'loss': math.nan, 'skipped': True}
OVERFLOW = {'loss': 1.0, 'skipped': True, 'overflow': True}


@pytest.fixture
def reporter():
    pace = Pace(tokens_per_step=1, flops=TokenFlops(causal=1, full=1), peak=Peak(1.0, 'by hand'), num_devices=1)
    return Reporter(
        # No step here is one that is logged.
        small_config(train__log_every=1000, train__num_steps=1000),
        writer=None,
        pace=pace,
        bar=tqdm(disable=True),
        windows_per_epoch=1,
        sources=None,
        skipped=3,
        best_loss=math.inf,
    )


def skips_in_a_row(reporter, history):
    for step, metrics in enumerate(history, start=1):
        reporter.submit(step, metrics, data_wait=0.0)
    reporter.flush()
    return reporter.skipped_in_a_row


@pytest.mark.parametrize(
    ('history', 'in_a_row'),
    [
        ([DIVERGED, DIVERGED], 2),
        ([DIVERGED, GOOD, DIVERGED], 1),
        ([DIVERGED, GOOD], 0),
        ([OVERFLOW] * 30, 0),
        # An overflow says nothing of the steps around it.
        ([DIVERGED, OVERFLOW, DIVERGED], 2),
        ([OVERFLOW, {**DIVERGED, 'overflow': False}], 1),
        ([{**GOOD, 'overflow': False}, OVERFLOW], 0),
    ],
)
def test_overflows_are_no_divergence(reporter, history, in_a_row):
    assert skips_in_a_row(reporter, history) == in_a_row


def test_all_that_were_left_out_are_counted_and_told_apart(reporter, monkeypatch):
    records = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, 'emit', records.append)
    monkeypatch.setattr(logger, 'handlers', [handler])
    monkeypatch.setattr(logger, 'level', logging.INFO)
    # Whether a level is on is remembered.
    logger._cache.clear()
    skips_in_a_row(reporter, [OVERFLOW, GOOD, DIVERGED])
    told = [(record.levelname, ' '.join(record.getMessage().split())) for record in records]
    assert told == [
        ('INFO', 'step 1 left out: its gradient overflowed, the loss scale is halved'),
        # With the three of earlier lives.
        ('WARNING', 'step 3 left out: its loss or gradient is not finite (5 so far)'),
    ]
