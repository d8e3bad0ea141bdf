"""Reward models from the command line: learning, exact resume, their use in GRPO, and refusals."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

from maxlm.cli.models import generate
from maxlm.cli.runs import grpo, train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.workdir.files import read_config
from tests.cli.runs.test_train import curve, params_of
from tests.small_posttraining import grpo_arguments, make_preferences, preference_arguments
from tests.starting import make_start

pytestmark = pytest.mark.usefixtures('shared_steps')

# The checkpoint has a head for tokens, which the reward model does not use.
UNTIED = {'model__tie_embeddings': False}
GRPO = {
    **UNTIED,
    'model__vocab_size': 0,
    'data__seq_len': 48,
    'grpo__reward': 'reward_model',
    'grpo__eval_num_generations': 0,
    'train__num_steps': 4,
}


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp('start')
    make_preferences(directory)
    shutil.rmtree(directory / 'sft')
    make_start(directory / 'sft', directory / 'data/tokenizer.json', **UNTIED)
    shutil.copy(directory / 'data/chat_template.jinja', directory / 'sft')
    for name, texts in {'prompts': 'abcdefgh', 'held_out': 'xyz'}.items():
        (directory / f'{name}.jsonl').write_text('\n'.join(json.dumps({'prompt': f'ab{text}'}) for text in texts))
    return directory


def train_reward(start, workdir, **overrides):
    settings = {**UNTIED, 'train__objective': 'reward', **overrides}
    return exit_code(train.main, [*preference_arguments(start, **settings), f'--workdir={workdir}'])


def run_grpo(start, workdir, **overrides):
    return exit_code(grpo.main, [*grpo_arguments(start, **{**GRPO, **overrides}), f'--workdir={workdir}'])


@pytest.fixture(scope='module')
def finished(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('finished') / 'run'
    assert train_reward(start, workdir) == EXIT_DONE
    return workdir


def resumed(finished, workdir, step):
    """Copies a run without its checkpoints after a step."""
    shutil.copytree(finished, workdir)
    for path in (workdir / 'checkpoints').iterdir():
        if path.name.isdigit() and int(path.name) > step:
            shutil.rmtree(path)
    return workdir


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_accuracy_on_held_out_pairs_increases(finished):
    lines = curve(finished)
    assert lines[1]['train/loss'] == pytest.approx(math.log(2), abs=0.02)
    assert lines[12]['train/loss'] < lines[1]['train/loss'] - 0.01
    assert lines[12]['eval/rewards/accuracies'] > 0.9
    assert lines[12]['train/rewards/chosen'] - lines[12]['train/rewards/rejected'] == pytest.approx(
        lines[12]['train/rewards/margins'], abs=1e-5
    )
    assert read_config(finished).model.reward_head
    assert 'the head of the reward model is initialized' in (finished / 'run.log').read_text()
    samples = [json.loads(line) for line in (finished / 'samples.jsonl').read_text().splitlines()]
    assert {line['step'] for line in samples} == {0, 6, 12}
    texts = [line['text'] for line in samples if line['step'] == 12]
    assert ['(chosen, score' in texts[0], '(rejected, score' in texts[1]] == [True, True]


def test_a_resumed_run_ends_bit_for_bit_like_the_complete_one(start, finished, tmp_path):
    workdir = resumed(finished, tmp_path / 'run', 6)
    assert train_reward(start, workdir) == EXIT_DONE
    assert_same(params_of(workdir, 12), params_of(finished, 12))


def test_adapters_train_the_head_of_the_reward_model(start, tmp_path):
    assert train_reward(start, tmp_path, model__lora_rank=4, eval__interval=0) == EXIT_DONE
    before, after = (params_of(tmp_path, step) for step in (6, 12))
    assert not np.array_equal(before['score']['kernel'], after['score']['kernel'])
    assert np.array_equal(before['embedding'], after['embedding'])


@pytest.fixture(scope='module')
def policy(start, finished, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('policy') / 'run'
    assert run_grpo(start, workdir, grpo__reward_model=finished) == EXIT_DONE
    return workdir


def test_rewards_of_a_rollout_are_scores(start, finished, policy):
    lines = curve(policy)
    assert lines[3]['rollout/reward'] != 0
    assert lines[3]['rollout/reward'] == pytest.approx(lines[3]['rollout/reward/reward_model'])
    assert lines[4]['eval/loss'] == -lines[4]['eval/reward']
    assert 'eval/accuracy' not in lines[4]
    assert '(reward ' in (policy / 'samples.jsonl').read_text()


def test_grpo_resumes_bit_for_bit_with_the_same_reward_model(start, finished, policy, tmp_path, capsys):
    workdir = resumed(policy, tmp_path / 'run', 2)
    other = resumed(finished, tmp_path / 'other', 6)
    assert run_grpo(start, workdir, grpo__reward_model=other) == EXIT_BAD_INPUT
    assert 'grpo.reward_model was' in capsys.readouterr().err
    assert run_grpo(start, workdir, grpo__reward_model=finished) == EXIT_DONE
    assert_same(params_of(workdir, 4), params_of(policy, 4))


def test_a_model_of_the_wrong_kind_is_refused(start, finished, tmp_path, capsys):
    def refusal(code):
        assert code == EXIT_BAD_INPUT
        return capsys.readouterr().err

    assert 'is a language model' in refusal(run_grpo(start, tmp_path / 'a', grpo__reward_model=start / 'sft'))
    assert "grpo.reward_model=''" in refusal(run_grpo(start, tmp_path / 'b'))
    assert 'has no effect' in refusal(
        run_grpo(start, tmp_path / 'c', grpo__reward_model=finished, grpo__reward='length')
    )
    assert 'is a reward model' in refusal(exit_code(generate.main, [f'--checkpoint={finished}', '--prompt=a']))
    arguments = preference_arguments(start, train__init_from=finished, **UNTIED)
    assert 'is a reward model' in refusal(exit_code(train.main, [*arguments, f'--workdir={tmp_path / "d"}']))
    arguments = preference_arguments(start, model__reward_head=True)
    assert 'predicts no tokens' in refusal(exit_code(train.main, [*arguments, f'--workdir={tmp_path / "e"}']))


def test_another_tokenizer_or_template_is_refused(start, finished, tmp_path, capsys):
    other = tmp_path / 'other'
    shutil.copytree(finished, other)
    template = other / 'chat_template.jinja'
    template.write_text(template.read_text() + ' ')
    assert run_grpo(start, tmp_path / 'run', grpo__reward_model=other) == EXIT_BAD_INPUT
    assert 'chat template' in capsys.readouterr().err
    (other / 'tokenizer.json').unlink()
    assert run_grpo(start, tmp_path / 'run', grpo__reward_model=other) == EXIT_BAD_INPUT
    assert 'its tokenizer' in capsys.readouterr().err
