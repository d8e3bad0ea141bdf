"""Tests metrics of data sources: shares, epochs and losses."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from maxlm.trainer.source_metrics import SourceMetrics, SourceStats


class Mixture:
    """Fake mixture in which three of four rows belong to the first source."""

    def __init__(self, *fractions):
        self.mixtures = [SimpleNamespace(fractions=stage) for stage in fractions or [(0.75, 0.25)]]

    def rows_taken(self, rows):
        return np.array([rows * 3 // 4, rows // 4])


def make_stats(*shares, weighted=True, warn_epochs=4.0, growing=(), summary=''):
    windows = {'web': 300, 'code': 10}
    corpus = SimpleNamespace(
        names=tuple(windows),
        sources=[SimpleNamespace(name=name, row_summary=lambda data: summary) for name in windows],
        source_windows=[None if name in growing else count for name, count in windows.items()],
        data=SimpleNamespace(sources=('given',) if weighted else (), warn_epochs=warn_epochs),
    )
    return SourceStats(corpus, Mixture(*shares))


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('maxlm'), 'propagate', True)
    caplog.set_level(logging.INFO, 'maxlm')
    return caplog


def test_shares_and_epochs_are_logged_at_the_start(log):
    make_stats().log_start(200)
    assert log.messages[0] == ('source web: share 75.00% requested, 75.00% actual; 300 windows, 0.5 epochs in this run')
    assert log.messages[1] == 'source code: share 25.00% requested, 25.00% actual; 10 windows, 5 epochs in this run'
    assert log.messages[2].startswith('source code is repeated 5.0 times, more than data.warn_epochs=4: ')
    assert len(log.messages) == 3
    log.clear()
    make_stats((0.9, 0.1), (0.5, 0.5)).log_start(200)
    assert log.messages[0].startswith('source web: share 90.00% then 50.00% requested, 75.00% actual; 300 windows')


def test_no_warning_below_the_limit_and_no_lines_without_weights(log):
    make_stats(warn_epochs=5.0).log_start(200)
    assert len(log.messages) == 2
    log.clear()
    make_stats(weighted=False).log_start(200)
    assert log.messages == []


def test_packed_rows_are_logged_for_each_source(log):
    make_stats(weighted=False, summary='900 of 1,000 tokens').log_start(200)
    assert log.messages == ['900 of 1,000 tokens'] * 2


def test_metrics_of_a_step():
    # The arguments are sums of losses and numbers of tokens. The second source has no tokens.
    metrics = make_stats().training_metrics(40, np.array([6.0, 0.0]), np.array([3, 0]))
    assert metrics == {
        'train/loss/web': 2.0,
        'train/tokens/web': 3.0,
        'data/fraction/web': 0.75,
        'data/fraction/code': 0.25,
        'data/epoch/web': 0.1,
        'data/epoch/code': 1.0,
    }
    assert set(make_stats(weighted=False).training_metrics(40, np.array([6.0, 2.0]), np.array([3, 1]))) == {
        'train/loss/web',
        'train/loss/code',
        'train/tokens/web',
        'train/tokens/code',
    }


def test_metrics_of_an_evaluation():
    assert make_stats().evaluation_metrics([1.5, float('nan')], [7, 0]) == {
        'eval/loss/web': 1.5,
        'eval/tokens/web': 7.0,
    }
    assert SourceMetrics().evaluation_metrics([1.5], [7]) == SourceMetrics().training_metrics(1, None, None) == {}
