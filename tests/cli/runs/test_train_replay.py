"""Runs with replays: bit for bit the same as without, and ended by a device that computes wrongly."""

import jax
import numpy as np
import pytest

from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.runs import grpo
from maxlm.errors import EXIT_DEVICE, EXIT_DONE, EXIT_PREEMPTED, exit_code
from maxlm.parallel.layout import Layout
from maxlm.telemetry.events import read_events
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.metrics import read_metrics
from maxlm.trainer.replay import Replays
from maxlm.training.decisions.replay import is_replayed
from tests.cli.runs.test_resume import LAST, SETTINGS
from tests.cli.runs.test_train import CONSTANT, curve, params_of, run, same
from tests.small_posttraining import grpo_arguments, make_preferences, make_prompts, preference_arguments

pytestmark = pytest.mark.usefixtures('shared_steps')

TEXT = {**SETTINGS, **CONSTANT, 'optimizer__ema_decay': 0.9}


def replayed(workdir):
    lines = [line for line in read_metrics(workdir) if 'replay/steps' in line]
    assert all(line['replay/differences'] == line['replay/loss_difference'] == 0 for line in lines)
    return int(lines[-1]['replay/steps']) if lines else 0


@pytest.fixture(scope='module')
def plain(dataset, tmp_path_factory):
    """Returns a run without replays."""
    workdir = tmp_path_factory.mktemp('plain') / 'run'
    assert run(dataset, workdir, **TEXT) == EXIT_DONE
    return workdir


def assert_same_runs(workdir, expected):
    assert curve(workdir) == curve(expected)
    for item in ('params', 'ema'):
        assert same(params_of(workdir, LAST, item), params_of(expected, LAST, item))


@pytest.mark.parametrize('fraction', [0.3, 1.0])
def test_replays_change_nothing(dataset, plain, tmp_path, fraction):
    assert run(dataset, tmp_path, **TEXT, guard__replay_fraction=fraction) == EXIT_DONE
    assert_same_runs(tmp_path, plain)
    expected = [step for step in range(1, LAST + 1) if is_replayed(step, fraction=fraction, seed=0)]
    assert replayed(tmp_path) == len(expected) > 0
    assert read_goodput(tmp_path).totals['replay'] > 0
    assert replayed(plain) == read_goodput(plain).totals['replay'] == 0


def test_a_resumed_run_replays_the_same_steps(dataset, plain, tmp_path, end_at, monkeypatch):
    settings = {**TEXT, 'guard__replay_fraction': 1.0}
    end_at(3, 'stopped')
    assert run(dataset, tmp_path, **settings) == EXIT_PREEMPTED
    monkeypatch.undo()
    assert run(dataset, tmp_path, **settings) == EXIT_DONE
    assert_same_runs(tmp_path, plain)


SCHEDULES = {
    'float16': {'model__dtype': 'float16', 'train__initial_loss_scale': 2.0**30},
    'host offload': {'mesh__host_offload': 'all', 'model__dropout': 0},
    'pipeline': {'model__num_layers': 2, 'mesh__stage': 2, 'mesh__fsdp': 4, 'train__per_device_batch_size': 1},
    'context': {'data__seq_len_schedule': '((4, 0.3), (8, 0.7))'},
    'unrolled': {'model__scan_layers': False},
}


@pytest.mark.parametrize('kind', SCHEDULES)
def test_replays_change_nothing_in_other_runs(dataset, tmp_path, kind):
    settings = {**TEXT, **SCHEDULES[kind]}
    for fraction in (0.0, 1.0):
        assert run(dataset, tmp_path / str(fraction), **settings, guard__replay_fraction=fraction) == EXIT_DONE
    assert_same_runs(tmp_path / '1.0', tmp_path / '0.0')
    assert replayed(tmp_path / '1.0') == LAST


@pytest.mark.parametrize('objective', ['dpo', 'grpo', 'grpo_async'])
def test_replays_change_nothing_in_posttraining(tmp_path, objective):
    from maxlm.cli.runs import train

    (tmp_path / 'data').mkdir()
    if objective == 'dpo':
        make_preferences(tmp_path / 'data')
        main, words = train.main, preference_arguments(tmp_path / 'data', **SETTINGS)
    else:
        make_prompts(tmp_path / 'data')
        settings = {**SETTINGS, 'eval__interval': LAST, 'grpo__max_staleness': int(objective == 'grpo_async')}
        main, words = grpo.main, grpo_arguments(tmp_path / 'data', **settings)
    for fraction in (0, 1):
        options = [f'--workdir={tmp_path}/{fraction}', f'--config.guard.replay_fraction={fraction}']
        assert exit_code(main, [*words, *options]) == EXIT_DONE
    assert curve(tmp_path / '1') == curve(tmp_path / '0')
    assert same(params_of(tmp_path / '1', LAST), params_of(tmp_path / '0', LAST))
    assert replayed(tmp_path / '1') == LAST


def test_a_wrong_step_ends_the_run(dataset, plain, tmp_path, monkeypatch, capsys):
    execute = Replays._execute

    def wrong(self, step, program, state, *words):
        execution, state = execute(self, step, program, state, *words)
        if step == 5 and not wrong.done:
            wrong.done = True
            kernel = state.params['embedding']
            state.params['embedding'] = jax.device_put(np.array(kernel) + 1, kernel.sharding)
        return execution, state

    wrong.done = False
    monkeypatch.setattr(Replays, '_execute', wrong)
    settings = {**TEXT, 'guard__replay_fraction': 1.0}
    assert run(dataset, tmp_path, **settings) == EXIT_DEVICE
    error = capsys.readouterr().err
    assert 'error: step 5 computed twice: the results differ' in error
    # The newest checkpoint is from before the wrong step.
    assert max(saved_steps(tmp_path)) == 4
    events = read_events(tmp_path).lines
    assert [(event['step'], event['cause']) for event in events if event['kind'] == 'replayed'] == [(5, 'device')]
    assert [event['kind'] for event in events if event.get('alert')] == ['device']
    assert events[-1]['code'] == EXIT_DEVICE
    # A restart repeats the step. The device is right this time.
    assert run(dataset, tmp_path, **settings) == EXIT_DONE
    assert_same_runs(tmp_path, plain)


def test_without_replays_the_wrong_step_is_saved(dataset, plain, tmp_path, monkeypatch):
    """Negative control of the test above."""
    execute = Replays._execute

    def wrong(self, step, *words):
        execution, state = execute(self, step, *words)
        if step == 5:
            kernel = state.params['embedding']
            state.params['embedding'] = jax.device_put(np.array(kernel) + 1, kernel.sharding)
        return execution, state

    monkeypatch.setattr(Replays, '_execute', wrong)
    assert run(dataset, tmp_path, **TEXT) == EXIT_DONE
    assert not same(params_of(tmp_path, LAST), params_of(plain, LAST))


@pytest.mark.parametrize('times', [1, 2])
def test_a_bad_step_is_replayed(dataset, tmp_path, monkeypatch, capsys, times):
    """A batch that is damaged on its first way to the devices is a fault of the machine, otherwise of the data."""
    put, count = Layout.put_batch, [0]

    def damage(self, batch, global_batch):
        if batch['tokens'].shape[0] == 8 and 'weights' in batch:
            count[0] += 1
            # Calls 1 and 2 are steps 1 and 2, call 3 is step 3, which is held, and call 4 is the replay of step 2.
            if count[0] == 2 or (count[0] == 4 and times == 2):
                batch = {**batch, 'weights': np.full_like(batch['weights'], np.nan)}
        return put(self, batch, global_batch)

    monkeypatch.setattr(Layout, 'put_batch', damage)
    settings = {**TEXT, 'eval__interval': 0, 'checkpoint__save_interval_steps': 0}
    code = run(dataset, tmp_path, **settings)
    events = [event for event in read_events(tmp_path).lines if event['kind'] == 'replayed']
    if times == 1:
        assert code == EXIT_DEVICE
        assert [(event['step'], event['cause']) for event in events] == [(2, 'device')]
        return
    assert code == EXIT_DONE
    assert [(event['step'], event['cause']) for event in events] == [(2, 'data')]
    assert 'the results are equal, so the data or the optimizer is the cause' in capsys.readouterr().out
    assert curve(tmp_path)[LAST]['train/skipped_steps'] == 1
