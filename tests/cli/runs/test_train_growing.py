"""Runs that start while their data is being prepared: they equal runs on the complete data."""

import signal
import time

import pytest

from maxlm.data.loader import growing, source
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, InputError
from maxlm.runtime.watchdog import Watchdog
from maxlm.telemetry.goodput import read_goodput
from maxlm.trainer import batch_source
from tests.cli.runs.test_train import CONSTANT, arguments, curve, params_of, run, same
from tests.messages import assert_error_line
from tests.processes import Processes
from tests.stepped_preparation import stepped, write_lines

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
    # Each look at the progress of the preparation takes this long.
    seconds = 0.3
    when_waiting(lambda: (time.sleep(seconds), preparation.release()))
    step_done = Watchdog.step_done
    monkeypatch.setattr(Watchdog, 'step_done', lambda watchdog: (progress.append(1), step_done(watchdog))[1])
    assert run(data, tmp_path / 'during', **SETTINGS) == EXIT_DONE
    assert f'waits for the preparation of {data}' in capsys.readouterr().out
    # New shards count as progress, besides the steps. Several may be complete at the end of one wait.
    assert len(progress) > 24
    assert preparation.finish() == 0
    assert run(data, tmp_path / 'after', **SETTINGS) == EXIT_DONE
    assert run(data, tmp_path / 'other', **SETTINGS, data__seed=1) == EXIT_DONE
    assert curves_equal(tmp_path / 'during', tmp_path / 'after')
    assert not curves_equal(tmp_path / 'during', tmp_path / 'other')
    assert same(params_of(tmp_path / 'during', 24), params_of(tmp_path / 'after', 24))
    assert EPOCH in curve(tmp_path / 'after')[24]
    assert EPOCH not in curve(tmp_path / 'during')[24]
    # The wait is time without data.
    assert read_goodput(tmp_path / 'during').totals['data_wait'] >= seconds


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
    assert_error_line(capsys.readouterr().err, 'error: train.num_epochs=0.1: the data is still being prepared')
    assert preparation.finish() == 0
    assert run(preparation.output, tmp_path / 'run', **settings) == EXIT_DONE


@pytest.fixture
def hub(tmp_path):
    """Returns a data set of the Hugging Face hub in a local directory, and the keys for it."""
    datasets = pytest.importorskip('datasets', reason='the extra hub')
    texts = [' '.join(str(number) for number in range(place, place + 80)) for place in range(60)]
    datasets.Dataset.from_dict({'text': texts}).to_json(tmp_path / 'corpus' / 'train-00000-of-00001.jsonl')
    return f'hf:{tmp_path}/corpus', {'data__tokenizer': 'bytes', 'data__cache_dir': tmp_path / 'cache'}


@pytest.mark.multiprocess
def test_data_of_the_hub(hub, tmp_path, capsys):
    name, keys = hub
    settings = {**SETTINGS, 'train__num_steps': 6, 'checkpoint__save_interval_steps': 6}
    assert run(name, tmp_path / 'none', **settings) == EXIT_BAD_INPUT
    assert "error: data.tokenizer='': " in capsys.readouterr().err
    assert run(name, tmp_path / 'run', **settings, **keys) == EXIT_DONE
    assert f'preparing {name} in {tmp_path}/cache/prepared/corpus-' in capsys.readouterr().out
    # The second run, and a mixture, use the same directory.
    assert run(name, tmp_path / 'again', **settings, **keys) == EXIT_DONE
    mixture = f"(('{name}', 0.6), ('{next((tmp_path / 'cache' / 'prepared').glob('corpus-*[!.log]'))}', 0.4))"
    assert run('unused', tmp_path / 'mixed', data__sources=mixture, **settings, **keys) == EXIT_DONE
    assert 'preparing' not in capsys.readouterr().out
    assert same(params_of(tmp_path / 'run', 6), params_of(tmp_path / 'again', 6))
    assert not same(params_of(tmp_path / 'run', 6), params_of(tmp_path / 'mixed', 6))


@pytest.mark.multiprocess
def test_several_processes_use_the_preparation_of_the_first(hub, tmp_path):
    name, keys = hub
    settings = {**SETTINGS, 'train__num_steps': 6, 'eval__interval': 0, **keys}
    with Processes(2, 4, arguments(name, tmp_path / 'two', **settings), logs=tmp_path / 'logs') as processes:
        codes = processes.wait()
        assert codes == [EXIT_DONE] * 2, processes.output(0) + processes.output(1)
        assert 'preparing' in processes.output(0)
        assert 'preparing' not in processes.output(1)
    assert run(name, tmp_path / 'one', **settings) == EXIT_DONE
    losses = [[line['train/loss'] for line in curve(tmp_path / part).values()] for part in ('one', 'two')]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_processes_without_a_shared_directory_are_refused(hub, tmp_path, capsys, monkeypatch):
    name, keys = hub
    monkeypatch.setattr(batch_source, 'is_shared', lambda directory: False)
    assert run(name, tmp_path / 'run', **SETTINGS, **keys) == EXIT_BAD_INPUT
    assert f'error: data.cache_dir={tmp_path}/cache is not the same directory for all' in capsys.readouterr().err
