"""`maxlm.Trainer` and `maxlm.Run`: the run of the command, callbacks, interruption and failure."""

import threading

import pytest

import maxlm
from maxlm.api.trainer import TrainingFailedError
from maxlm.errors import InputError
from tests.cli.runs.test_train import SMALL, curve, run

pytestmark = pytest.mark.usefixtures('shared_steps')

STEPS = 6


@pytest.fixture
def config(dataset):
    return maxlm.Config.get('tiny', {**SMALL, 'data.path': dataset, 'train.num_steps': STEPS, 'eval.interval': 3})


def losses(metrics):
    return [line['train/loss'] for line in metrics if 'train/loss' in line]


def test_a_run_equals_that_of_the_command(config, dataset, tmp_path):
    lines = []
    trainer = maxlm.Trainer(config, workdir=tmp_path / 'run', callbacks=[lambda *line: lines.append(line)])
    result = trainer.train()
    assert run(dataset, tmp_path / 'command', train__num_steps=STEPS, eval__interval=3) == 0
    assert losses(result.metrics) == losses(curve(tmp_path / 'command').values())
    # The callback received each line.
    assert [(line.pop('step'), line.pop('time') > 0) for line in result.metrics] == [(step, True) for step, _ in lines]
    assert [line['step'] for line in result.metrics if 'eval/loss' in line] == [3, 6]
    assert result.summary['eval/loss'] == result.checkpoints[-1].validation_loss
    assert (result.outcome, result.config.train.num_steps) == ('finished', STEPS)
    assert [checkpoint.step for checkpoint in result.checkpoints] == [STEPS]
    assert result.model(STEPS).step == result.model().step == STEPS
    assert f': finished, step {STEPS}, train/loss=' in repr(result)


def test_a_callback_stops_a_run_which_resumes(config, tmp_path):
    reference = losses(maxlm.Trainer(config, workdir=tmp_path / 'reference').train().metrics)
    stopped = maxlm.Trainer(config, workdir=tmp_path / 'run', callbacks=[lambda step, _: step >= 2]).train()
    assert stopped.outcome == 'preempted'
    assert len(losses(stopped.metrics)) < STEPS
    assert 'stopped by a callback' in stopped.events[-1]['message']
    resumed = maxlm.Trainer(config, workdir=tmp_path / 'run').train()
    assert (resumed.outcome, losses(resumed.metrics)) == ('finished', reference)


def test_an_exception_of_a_callback_ends_the_run(config, tmp_path):
    def fail(step, metrics):
        raise KeyError('train/los')

    with pytest.raises(KeyError, match='train/los'):
        maxlm.Trainer(config, workdir=tmp_path / 'run', callbacks=[fail]).train()
    assert maxlm.Run(tmp_path / 'run').outcome == 'failed'


def test_a_diverged_run_raises(config, tmp_path, change_batches):
    change_batches(poisoned=range(STEPS))
    trainer = maxlm.Trainer(
        config.replace({'guard.max_consecutive_skips': 2, 'guard.max_rollbacks': 0}), workdir=tmp_path / 'run'
    )
    with pytest.raises(TrainingFailedError, match='not finite'):
        trainer.train()


def test_a_run_in_a_thread(config, tmp_path):
    """Signal handlers can only be set in the main thread."""
    results = []
    thread = threading.Thread(
        target=lambda: results.append(maxlm.Trainer(config, workdir=tmp_path / 'run').train().outcome)
    )
    thread.start()
    thread.join()
    assert results == ['finished']


def test_wrong_arguments(config, tmp_path):
    with pytest.raises(InputError, match='set workdir'):
        maxlm.Trainer(config)
    assert maxlm.Trainer('tiny').workdir == 'runs/tiny'
    with pytest.raises(InputError, match='No such file or directory'):
        maxlm.Run(tmp_path / 'missing')


def test_paths_may_begin_with_the_home_directory(config, dataset, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    assert maxlm.Trainer(config, workdir='~/run').workdir == f'{tmp_path}/run'
    (tmp_path / 'data').symlink_to(dataset)
    assert maxlm.Dataset('~/data').path == f'{tmp_path}/data'
    for read in (maxlm.Run, maxlm.load):
        with pytest.raises(InputError, match=f'{tmp_path}/run'):
            read('~/run')
    # An empty path would be the current directory.
    for read in (lambda path: maxlm.Trainer(config, workdir=path), maxlm.Run, maxlm.load, maxlm.Dataset):
        with pytest.raises(InputError, match='the path is empty'):
            read('')
