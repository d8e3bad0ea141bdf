"""Runs that start while their data is being prepared: they equal runs on the complete data."""

import signal

import pytest

from maxlm.data.loader import growing, source
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, InputError
from maxlm.runtime.watchdog import Watchdog
from maxlm.telemetry.goodput import read_goodput
from tests.stepped_preparation import stepped, write_lines
from tests.test_train import CONSTANT, curve, params_of, run, same

pytestmark = pytest.mark.usefixtures('shared_steps')

SETTINGS = {**CONSTANT, 'train__num_steps': 24, 'checkpoint__save_interval_steps': 12, 'checkpoint__max_to_keep': 9}
# Metrics that need the length of an epoch.
EPOCH = 'train/epoch'


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(growing, 'POLL_SECONDS', 0.005)
    monkeypatch.setattr(growing, 'REPORT_SECONDS', 0)
    monkeypatch.setattr(source, 'POLL_SECONDS', 0.005)


@pytest.fixture
def preparation(monkeypatch, tmp_path):
    with stepped(monkeypatch, write_lines(tmp_path / 'texts'), tmp_path / 'data') as preparation:
        preparation.step()
        yield preparation


@pytest.fixture
def when_waiting(monkeypatch):
    """Returns a function that sets what happens whenever the training waits for its data."""
    read_progress = growing.read_progress

    def set_action(action):
        monkeypatch.setattr(growing, 'read_progress', lambda path: (action(), read_progress(path))[1])

    return set_action


def curves_equal(a, b):
    return [{k: v for k, v in line.items() if k != EPOCH} for line in curve(a).values()] == [
        {k: v for k, v in line.items() if k != EPOCH} for line in curve(b).values()
    ]


def test_a_run_during_the_preparation_equals_one_after_it(preparation, tmp_path, capsys, when_waiting, monkeypatch):
    data, progress = preparation.output, []
    when_waiting(preparation.release)
    step_done = Watchdog.step_done
    monkeypatch.setattr(Watchdog, 'step_done', lambda watchdog: (progress.append(1), step_done(watchdog))[1])
    assert run(data, tmp_path / 'during', **SETTINGS) == EXIT_DONE
    assert f'waits for the preparation of {data}' in capsys.readouterr().out
    # Each new shard counts as progress, besides the steps.
    assert len(progress) >= 24 + 2
    assert preparation.finish() == 0
    assert run(data, tmp_path / 'after', **SETTINGS) == EXIT_DONE
    assert run(data, tmp_path / 'other', **SETTINGS, data__seed=1) == EXIT_DONE
    assert curves_equal(tmp_path / 'during', tmp_path / 'after')
    assert not curves_equal(tmp_path / 'during', tmp_path / 'other')
    assert same(params_of(tmp_path / 'during', 24), params_of(tmp_path / 'after', 24))
    assert EPOCH in curve(tmp_path / 'after')[24]
    assert EPOCH not in curve(tmp_path / 'during')[24]
    # The wait is time without data.
    waits = [read_goodput(tmp_path / name).totals['data_wait'] for name in ('during', 'after')]
    assert waits[0] > waits[1]


def test_a_run_resumes_after_the_end_of_the_preparation(preparation, tmp_path):
    data = preparation.output
    preparation.step(2)
    first = {**SETTINGS, 'train__num_steps': 6, 'checkpoint__save_interval_steps': 6}
    assert run(data, tmp_path / 'resumed', **first) == EXIT_DONE
    assert preparation.finish() == 0
    assert run(data, tmp_path / 'resumed', **SETTINGS) == EXIT_DONE
    assert run(data, tmp_path / 'at once', **SETTINGS) == EXIT_DONE
    assert same(params_of(tmp_path / 'resumed', 24), params_of(tmp_path / 'at once', 24))
    assert not same(params_of(tmp_path / 'resumed', 24), params_of(tmp_path / 'resumed', 6))


def steps_of(workdir):
    return sorted(int(path.name) for path in (workdir / 'checkpoints').glob('[0-9]*'))


def test_a_preparation_that_fails_ends_the_run_with_a_checkpoint(preparation, tmp_path, capsys, when_waiting):
    data = preparation.output
    when_waiting(lambda: preparation.stop(InputError('texts/5: damaged')))
    assert run(data, tmp_path / 'run', **SETTINGS) == EXIT_BAD_INPUT
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: step')]
    assert f'needs more data, but the preparation of {data} failed: texts/5: damaged; run the same command' in error
    step = int(error.split()[2])
    assert step > 1
    assert steps_of(tmp_path / 'run') == [step - 1]


def test_a_waiting_run_stops_on_request(preparation, tmp_path, when_waiting):
    data = preparation.output
    when_waiting(lambda: signal.raise_signal(signal.SIGINT))
    assert run(data, tmp_path / 'run', **SETTINGS) == EXIT_PREEMPTED
    (step,) = steps_of(tmp_path / 'run')
    assert step < 24
    # No step is possible with pools of two shards, so there is no state to save.
    assert run(data, tmp_path / 'other', **SETTINGS, data__shuffle_shards=2) == EXIT_PREEMPTED
    assert steps_of(tmp_path / 'other') == []
    assert preparation.finish() == 0
    assert run(data, tmp_path / 'run', **SETTINGS) == EXIT_DONE


def test_a_length_in_epochs_needs_the_end_of_the_preparation(preparation, tmp_path, capsys):
    settings = {**SETTINGS, 'train__num_steps': 0, 'train__num_epochs': 0.1}
    assert run(preparation.output, tmp_path / 'run', **settings) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert 'error: train.num_epochs=0.1: the data is still being prepared' in error
    assert error.count('\n') == 1
    assert preparation.finish() == 0
    assert run(preparation.output, tmp_path / 'run', **settings) == EXIT_DONE
