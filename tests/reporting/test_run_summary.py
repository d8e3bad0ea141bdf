"""Tests the summary computed from a history."""

import pytest

from maxlm.reporting.run_summary import make_runs, ratio
from maxlm.telemetry.run_history import RunHistory
from tests import workdirs


def test_a_finished_run(run_of):
    (run,) = run_of('finished')
    assert (run.name, run.color, run.step, run.num_steps) == ('finished', 0, 400, 400)
    assert run.best == (400, pytest.approx(workdirs.validation_loss(400)))
    assert run.status.state == 'finished'
    assert len(run.start_events) == 2
    assert run.wall_seconds == pytest.approx(run.goodput_log.seconds, abs=0.01)
    assert run.dollars == pytest.approx((run.wall_seconds - 60) / 3600 * workdirs.PRICE_PER_HOUR, rel=1e-3)
    assert run.sources('train/loss') == ['code', 'web']
    assert run.last('perf/mfu') == pytest.approx(0.4, abs=0.05)
    assert (run.median('no'), run.highest('no'), run.last('no')) == (None, None, None)
    assert [(mark.x, mark.kind) for mark in run.marks] == [(150, 'restart')]
    assert [mark.kind for mark in run.time_marks] == ['restart']


def test_alerts_and_rollbacks_are_marks(run_of):
    (run,) = run_of('diverged')
    assert [(mark.x, mark.kind) for mark in run.marks] == [(220, 'alert'), (220, 'restart'), (220, 'alert')]


def test_cost_includes_all_hosts(run_of):
    (run,) = run_of('two_hosts')
    hours = run.goodput_log.seconds / 3600
    assert run.dollars == pytest.approx(8 * hours * workdirs.PRICE_PER_HOUR, rel=1e-3)


@pytest.mark.parametrize('name', workdirs.BUILDERS)
def test_every_state(run_of, name):
    (run,) = run_of(name)
    assert run.status.state
    assert (run.step is None) == (name == 'empty')
    assert (run.goodput_log is None) == (name == 'empty')


def test_runs_of_the_same_name_are_named_by_their_paths():
    histories = [RunHistory('/a/run'), RunHistory('/b/run'), RunHistory('/b/other')]
    assert [run.name for run in make_runs(histories, 0.0)] == ['/a/run', '/b/run', 'other']


def test_ratio():
    assert ratio(3.0, 2.0) == 1.5
    assert [ratio(None, 1.0), ratio(1.0, None), ratio(1.0, 0.0)] == [None] * 3
