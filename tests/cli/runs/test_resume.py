"""Exact resume: an interrupted and resumed run has the losses and parameters of an uninterrupted run.

The matrix has objectives as rows and kinds of interruption as columns. An exception simulates a kill;
`test_train_killed.py`, `test_train_processes_killed.py` and `test_train_buckets.py` kill real processes.
"""

import functools
import shutil

import pytest

from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.runs import grpo, train
from maxlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, exit_code
from maxlm.rl.rollouts import RolloutBatches
from maxlm.telemetry.events import read_events
from tests.cli.runs.test_train import arguments, curve, ends, params_of, run, same
from tests.ended_runs import KilledError
from tests.small_posttraining import (
    WINDOW,
    grpo_arguments,
    make_chats,
    make_labels,
    make_preferences,
    make_prompts,
    preference_arguments,
)

pytestmark = pytest.mark.usefixtures('shared_steps')

# With two responses of a group, many rewards are equal.
DYNAMIC = {
    'grpo__max_num_gen_batches': 3,
    'grpo__num_generations': 2,
    'grpo__prompts_per_rollout': 8,
    'grpo__num_iterations': 2,
}
# PPO with its KL divergence in the rewards.
PPO = {'grpo__advantage_estimator': 'gae', 'grpo__kl_coef': 0.05, 'grpo__kl_in_reward': True}
OBJECTIVES = ('next_token', 'experts', 'instruction', 'dpo', 'kto', 'grpo', 'grpo_async', 'grpo_dynamic', 'grpo_ppo')
LAST = 6
SETTINGS = {
    'train__num_steps': LAST,
    'checkpoint__save_interval_steps': 2,
    'checkpoint__max_to_keep': LAST,
    'eval__interval': 2,
    'eval__num_samples': 0,
}
# Texts and conversations use the same model, so that their runs share programs.
NEXT_TOKEN = {**SETTINGS, 'optimizer__ema_decay': 0.9, 'model__vocab_size': 264, 'data__seq_len': WINDOW}
# With a constant rate after the warm-up, runs of different lengths share the same step.
NEXT_TOKEN |= {'optimizer__schedule': 'constant'}
# The optimizer does not update the bias that balances the loads.
EXPERTS = {
    **NEXT_TOKEN,
    'model__num_experts': 4,
    'model__num_experts_per_token': 2,
    'model__router_balance_bias': True,
    'model__num_layers': 2,
    'model__num_dense_layers': 1,
}
EVERY_STEP = {**NEXT_TOKEN, 'train__num_steps': 4, 'checkpoint__save_interval_steps': 1}


def without_workdir(words):
    return [word for word in words if not word.startswith('--workdir=')]


@pytest.fixture(scope='module')
def commands(dataset, tmp_path_factory):
    """Returns the main function and the arguments of each objective."""
    directory = tmp_path_factory.mktemp('start')
    preferences, prompts = directory / 'preferences', directory / 'prompts'
    preferences.mkdir()
    prompts.mkdir()
    make_preferences(preferences)
    make_labels(preferences)
    make_chats(preferences, preferences / 'data/tokenizer.json')
    make_prompts(prompts)
    texts, chats = arguments(dataset, '', **NEXT_TOKEN), arguments(preferences / 'chats', '', **NEXT_TOKEN)
    # A stopped run does not evaluate, and GRPO would stop at a step with evaluation.
    rewarded = {**SETTINGS, 'eval__interval': LAST}
    return {
        'next_token': (train.main, without_workdir(texts)),
        'experts': (train.main, without_workdir(arguments(dataset, '', **EXPERTS))),
        'instruction': (train.main, without_workdir(chats)),
        'dpo': (train.main, preference_arguments(preferences, **SETTINGS)),
        'kto': (
            train.main,
            preference_arguments(preferences, **SETTINGS, data__path=preferences / 'labels', dpo__loss_type='kto'),
        ),
        'grpo': (grpo.main, grpo_arguments(prompts, **rewarded)),
        'grpo_async': (grpo.main, grpo_arguments(prompts, **rewarded, grpo__max_staleness=1)),
        'grpo_dynamic': (grpo.main, grpo_arguments(prompts, **rewarded, **DYNAMIC)),
        'grpo_ppo': (grpo.main, grpo_arguments(prompts, **rewarded, **PPO)),
    }


@pytest.fixture(scope='module')
def uninterrupted(commands, tmp_path_factory):
    """Returns a cached function that runs an objective without interruption."""
    made = {}

    def uninterrupted(objective):
        if objective not in made:
            made[objective] = tmp_path_factory.mktemp('uninterrupted') / objective
            main, words = commands[objective]
            assert exit_code(main, [*words, f'--workdir={made[objective]}']) == EXIT_DONE
        return made[objective]

    return uninterrupted


@pytest.fixture(scope='module')
def last_params():
    """Returns a cached function that reads the last parameters of an uninterrupted run."""
    return functools.cache(lambda workdir, item: params_of(workdir, max(saved_steps(workdir)), item))


@pytest.fixture
def assert_same_runs(last_params):
    def assert_same_runs(workdir, expected, items=('params',)):
        assert curve(workdir) == curve(expected)
        for item in items:
            assert same(params_of(workdir, max(saved_steps(workdir)), item), last_params(expected, item))

    return assert_same_runs


@pytest.mark.parametrize(
    ('objective', 'how'),
    [
        ('next_token', 'killed'),
        *((objective, 'stopped') for objective in OBJECTIVES),
        *(pytest.param(objective, 'killed', marks=pytest.mark.nightly) for objective in OBJECTIVES[1:]),
    ],
)
def test_a_run_that_ended_early_resumes_exactly(
    commands, uninterrupted, end_at, assert_same_runs, tmp_path, monkeypatch, objective, how
):
    main, words = commands[objective]
    command = [*words, f'--workdir={tmp_path}']
    # GRPO saves only after both steps of a rollout.
    step = 3
    end_at(step, how)
    if how == 'killed':
        with pytest.raises(KilledError):
            exit_code(main, command)
        expected = 2
    else:
        assert exit_code(main, command) == EXIT_PREEMPTED
        expected = 4 if objective.startswith('grpo') else step
    assert max(saved_steps(tmp_path)) == expected
    monkeypatch.undo()
    assert exit_code(main, command) == EXIT_DONE
    assert_same_runs(
        tmp_path,
        uninterrupted(objective),
        ('params', 'ema') if 'optimizer.ema_decay' in ' '.join(words) else ('params',),
    )
    if objective == 'grpo_dynamic':
        assert max(line.get('rollout/num_gen_batches', 0) for line in curve(tmp_path).values()) > 1
    first = (1, 'preempted', EXIT_PREEMPTED) if how == 'stopped' else (1, 'failed', EXIT_FAILED)
    assert ends(tmp_path) == [first, (2, 'finished', EXIT_DONE)]
    resumed = [event['from_step'] for event in read_events(tmp_path).lines if event['kind'] == 'resumed']
    assert resumed == [expected]
    # Negative control: training changes the parameters.
    assert not same(params_of(tmp_path, 2), params_of(tmp_path, LAST))


def test_asynchronous_rollouts_need_the_responses_of_the_checkpoint(commands, uninterrupted, tmp_path, monkeypatch):
    """Negative control: the parameters of the checkpoint generate other responses than the older ones."""
    main, words = commands['grpo_async']
    shutil.copytree(uninterrupted('grpo_async'), tmp_path / 'run')
    for step in (4, LAST):
        shutil.rmtree(tmp_path / f'run/checkpoints/{step}')
    monkeypatch.setattr(RolloutBatches, 'load_state_arrays', lambda self, arrays: None)
    assert exit_code(main, [*words, f'--workdir={tmp_path / "run"}']) == EXIT_DONE
    lines, expected = curve(tmp_path / 'run'), curve(uninterrupted('grpo_async'))
    assert (expected[3]['rollout/staleness'], lines[3]['rollout/staleness']) == (2, 0)
    assert lines[3]['train/loss'] != expected[3]['train/loss']


@pytest.fixture(scope='module')
def every_step(dataset, tmp_path_factory):
    """Returns a run that saved each of its four steps."""
    workdir = tmp_path_factory.mktemp('every') / 'run'
    assert run(dataset, workdir, **EVERY_STEP) == EXIT_DONE
    assert sorted(curve(workdir)) == [1, 2, 3, 4]
    assert not same(params_of(workdir, 4), params_of(workdir, 4, 'ema'))
    return workdir


@pytest.mark.parametrize('step', [1, 2, 3])
def test_resume_from_each_step_is_exact(dataset, every_step, assert_same_runs, tmp_path, step):
    # A run that is killed shortly after a save has later metric lines, but no later checkpoint.
    workdir = tmp_path / 'run'
    shutil.copytree(every_step, workdir)
    for later in range(step + 1, 5):
        shutil.rmtree(workdir / 'checkpoints' / str(later))
    assert run(dataset, workdir, **{**EVERY_STEP, 'checkpoint__save_interval_steps': 0}) == EXIT_DONE
    assert_same_runs(workdir, every_step, ('params', 'ema'))


def test_another_data_order_is_detected(dataset, every_step, last_params, tmp_path):
    """Negative control: another data order changes curves and parameters."""
    assert run(dataset, tmp_path, **{**EVERY_STEP, 'checkpoint__save_interval_steps': 0}, data__seed=1) == EXIT_DONE
    assert curve(tmp_path)[1]['train/loss'] != curve(every_step)[1]['train/loss']
    assert not same(params_of(tmp_path, 4), last_params(every_step, 'params'))
