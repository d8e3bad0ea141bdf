"""Tests the data of the dashboard."""

import dataclasses

import pytest

from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.config.serialization import to_json
from maxlm.monitoring import dashboard_data as dashboard_data_module
from maxlm.monitoring.dashboard_data import Curves, dashboard_data, devices_of
from maxlm.reporting.curves import curve
from maxlm.telemetry.run_history import RunHistory, read_history
from maxlm.telemetry.run_status import RUNNING, STARTING
from tests import workdirs
from tests.run_lines import NOW, NUM_STEPS, TOKENS_PER_STEP


def test_running_run(tmp_path):
    history = read_history(workdirs.running(tmp_path))
    data = dashboard_data(history, NOW)
    assert (data.step, data.num_steps, data.attempt) == (234, NUM_STEPS, 1)
    assert (data.tokens, data.num_tokens) == (234 * TOKENS_PER_STEP, NUM_STEPS * TOKENS_PER_STEP)
    # 8 s of startup, 5 s of compilation, 234 steps, two evaluations and two saves.
    assert data.seconds == pytest.approx(8 + 5 + 234 * 0.5 + 2 * 3 + 2 * 1.5)
    assert data.seconds_by_category == pytest.approx(
        {'start': 8, 'compile': 5, 'step': 234 * 0.48, 'data_wait': 234 * 0.02, 'evaluation': 6, 'checkpoint': 3}
    )
    assert data.latest['train/loss'] == workdirs.train_loss(230)
    assert data.latest['eval/loss'] == workdirs.validation_loss(200)
    assert data.last_eval_step == 200
    assert data.curves['eval/loss'] == [(step, workdirs.validation_loss(step)) for step in (100, 200)]
    assert [len(data.curves[name]) for name in ('train/loss', 'train/grad_norm')] == [23, 23]
    assert data.is_active


def test_remaining_time_decreases_only_while_the_run_is_active(tmp_path):
    history = read_history(workdirs.running(tmp_path))
    newest = history.metrics[-1]
    seconds_left = newest['perf/eta_seconds'] - (NOW - newest['time'])
    assert dashboard_data(history, NOW).seconds_left == pytest.approx(seconds_left)
    assert dashboard_data(history, NOW + 20).seconds_left == pytest.approx(seconds_left - 20)
    exited = dataclasses.replace(history, alive=False)
    assert dashboard_data(exited, NOW + 20).seconds_left == newest['perf/eta_seconds']
    assert dashboard_data(exited, NOW + 20).seconds == dashboard_data(history, NOW).seconds


def test_remaining_time_is_estimated_from_throughput(tmp_path):
    history = read_history(workdirs.on_cpu(tmp_path))
    bare = [{k: v for k, v in line.items() if not k.startswith('cost/')} for line in history.metrics]
    data = dashboard_data(dataclasses.replace(history, metrics=bare), NOW)
    # A step takes 0.5 s. Every hundred steps, an evaluation takes 3 s and a save 1.5 s.
    assert data.seconds_left == pytest.approx((NUM_STEPS - 234) * (0.5 + 0.045), rel=0.03)


def test_cost(tmp_path):
    data = dashboard_data(read_history(workdirs.two_hosts(tmp_path / 'a')), NOW)
    # Eight devices at $3.50 an hour.
    assert data.dollars == pytest.approx(data.seconds / 3600 * 8 * 3.5, rel=1e-3)
    assert data.dollars_left == pytest.approx(data.seconds_left / 3600 * 8 * 3.5, rel=0.1)
    unpriced = dashboard_data(read_history(workdirs.on_cpu(tmp_path / 'b')), NOW)
    assert (unpriced.dollars, unpriced.dollars_left) == (None, None)


def test_finished_run_has_no_remaining_time(tmp_path):
    data = dashboard_data(read_history(workdirs.finished(tmp_path)), NOW + 1e6)
    assert (data.step, data.seconds_left, data.is_active) == (NUM_STEPS, 0.0, False)
    assert not data.dollars_left
    assert data.seconds == pytest.approx(sum(data.seconds_by_category.values()), abs=0.01)
    assert data.seconds_by_category['idle'] == pytest.approx(60, abs=0.01)


def test_rollback_reduces_the_step(tmp_path):
    scribe = workdirs.RunWriter(tmp_path)
    scribe.start()
    scribe.train(220)
    scribe.roll_back(to=200)
    workdirs.lock(tmp_path)
    assert dashboard_data(read_history(scribe.close()), NOW).step == 200


def test_attempt_before_its_restore_shows_the_last_step_of_the_previous_one(tmp_path):
    scribe = workdirs.RunWriter(tmp_path)
    scribe.start()
    scribe.train(170)
    scribe._beat('beat')
    scribe.start(from_step=100, idle=60)
    workdirs.lock(tmp_path)
    for line in scribe.lines['goodput.jsonl']:
        if line['life'] == 2:
            line.update(step=None, start_step=None)
    scribe.close()
    data = dashboard_data(read_history(tmp_path), NOW)
    assert (data.step, data.attempt, data.status.state) == (170, 2, STARTING)
    assert data.seconds_left == dashboard_data(read_history(tmp_path), NOW + 10).seconds_left
    scribe.train(111)
    scribe._beat('beat')
    data = dashboard_data(read_history(scribe.close()), NOW)
    assert (data.step, data.status.state) == (111, RUNNING)


def test_nonfinite_loss_is_none(tmp_path):
    data = dashboard_data(read_history(workdirs.diverged(tmp_path)), NOW)
    assert data.latest['train/loss'] is None
    assert data.latest['train/skipped_steps'] == 40
    assert [y for x, y in data.curves['train/loss'] if x > 200] == [None, None]


def test_empty_history():
    data = dashboard_data(RunHistory('missing'), NOW)
    assert (data.step, data.num_steps, data.tokens, data.seconds, data.dollars) == (0, None, None, None, None)
    assert not data.is_active


def test_budget_with_undecided_length(tmp_path):
    workdirs.running(tmp_path)
    (tmp_path / 'config.json').write_text(to_json(workdirs.config(num_steps=UNDECIDED_STEPS)))
    data = dashboard_data(read_history(tmp_path), NOW)
    assert (data.num_steps, data.num_tokens) == (None, None)


def test_devices(tmp_path):
    data = dashboard_data(read_history(workdirs.two_hosts(tmp_path)), NOW + 50)
    assert [reading.process for reading in data.readings] == [0, 1]
    assert [len(devices_of(reading)) for reading in data.readings] == [4, 4]
    assert data.readings[0].age == pytest.approx(50)


def lines_with(steps, loss):
    return [{'step': step, 'train/loss': loss} for step in steps]


def test_appended_metrics_are_added_and_other_metrics_are_recomputed(monkeypatch):
    curves = Curves(['train/loss', 'eval/loss'])
    metrics = lines_with(range(10), 1.0)
    assert curves.update(metrics)['train/loss'] == [(step, 1.0) for step in range(10)]
    metrics = [*metrics, *lines_with(range(10, 12), 2.0), {'step': 12, 'eval/loss': 3.0}]
    read = []
    monkeypatch.setattr(dashboard_data_module, 'curve', lambda new, name: (read.append(len(new)), curve(new, name))[1])
    found = curves.update(metrics)
    assert read[:2] == [3, 3]
    assert found == Curves(['train/loss', 'eval/loss']).update(metrics)
    # A rollback replaces the last lines.
    other = [*metrics[:5], *lines_with(range(5, 30), 7.0)]
    assert curves.update(other) == Curves(['train/loss', 'eval/loss']).update(other)
    assert curves.update(metrics[:3])['train/loss'] == [(step, 1.0) for step in range(3)]
    assert curves.update([]) == {'train/loss': [], 'eval/loss': []}
