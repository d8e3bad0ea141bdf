"""GRPO with the environment of examples/guess_number.py: tokens, masks, rewards, failures and resume."""

import json
import string
from typing import ClassVar

import numpy as np
import pytest

from maxlm.cli.runs import grpo
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.tokenizer import chars_tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.rl.environments.first_process import run_in_first_process
from maxlm.rl.generation.environment_sampler import (
    Environments,
    EnvironmentSampler,
    environment_metrics,
    seeded_examples,
)
from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.rl.generation.timed_environment import Stopwatch
from maxlm.rl.generation.turns import Turns, TurnSampler
from maxlm.rl.rollout_batch import response_rows, with_advantages
from maxlm.training.state import init_state
from tests.cli.runs.test_train import curve, params_of, same
from tests.rl.generation.two_processes import fake_processes
from tests.small import small_config, small_layout
from tests.small_posttraining import grpo_arguments
from tests.starting import make_start
from tests.user_modules import write_module

LETTERS = f'\n .{string.ascii_letters}{string.digits}'
TOKENIZER = chars_tokenizer([LETTERS]).with_special_tokens(['<|im_start|>', '<|im_end|>'])
CHAT = ChatEncoder(TOKENIZER, ChatTemplate(CHATML, name='test'))
T, R, SAMPLES = 160, 96, 4
FLAKY = '''
from examples.guess_number import GuessNumber

class Flaky(GuessNumber):
    """Fails for seeds that are odd, or for all of them."""

    def __init__(self, every=2):
        super().__init__()
        self.every = every

    def score(self, trajectory):
        if trajectory.seed % self.every == 0 and len(trajectory.messages[-1]['content']) % self.every == 0:
            raise ConnectionError('no network')
        return super().score(trajectory)
'''


class Recorder:
    """Answers each turn with its number, ends after the third one, and records the conversation."""

    seen: ClassVar = []

    def reset(self, example, seed):
        self.example = example
        return [{'role': 'user', 'content': example['text']}]

    def step(self, messages):
        count = sum(message['role'] == 'assistant' for message in messages)
        return [{'role': 'user', 'content': f'{count}'}], 0.25, count == 3

    def score(self, trajectory):
        Recorder.seen.append(trajectory)
        if self.example['text'] == 'bad':
            raise ValueError('bad')
        return {'turns': len(trajectory.rewards)}


@pytest.fixture(scope='module')
def sampled():
    config = small_config(
        data__seq_len=T,
        train__global_batch_size=4,
        grpo__num_generations=SAMPLES,
        grpo__max_completion_length=R,
        grpo__environment='tests:Recorder',
        model__vocab_size=TOKENIZER.vocab_size,
        model__max_positions=T,
    )
    layout = small_layout(config)
    params = init_state(config, layout).params
    # Several ends, so that a random model ends turns.
    ends = (CHAT.end_of_turn, *range(5))
    first = Sampler(config, layout, ends=ends, max_prompt=T - R, max_tokens=R)
    turns = TurnSampler(first, config, layout, ends=ends)
    sampler = EnvironmentSampler(turns, Environments(Recorder, CHAT), config, stopwatch=Stopwatch())
    return config, layout, params, sampler


def draw(sampled, *texts):
    Recorder.seen.clear()
    *_, params, sampler = sampled
    starts = seeded_examples([{'text': text} for text in texts], seed=0)
    return sampler(params, starts, seed=0, num_samples=SAMPLES)


def test_weights_without_a_score_are_reported(sampled, monkeypatch, caplog):
    words = 'weights has turn, but score returned no such name for any conversation'
    for weights, warns in (({'turn': 1.0}, True), ({'turns': 1.0}, False)):
        caplog.clear()
        monkeypatch.setattr(Recorder, 'weights', weights, raising=False)
        draw(sampled, 'abc', 'no')
        assert (words in caplog.text) == warns


def test_an_interrupted_rollout_closes_its_environments(sampled, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    def close(environment):
        closed.append(environment)

    closed = []
    monkeypatch.setattr(Recorder, 'close', close, raising=False)
    monkeypatch.setattr(Turns, 'generate', interrupt)
    with pytest.raises(KeyboardInterrupt):
        draw(sampled, 'abc', 'no')
    assert len(set(closed)) == 2 * SAMPLES


def test_tokens_are_those_of_the_model_and_of_the_template(sampled):
    config, *_ = sampled
    responses = draw(sampled, 'abc', 'no')
    prompts = responses.environment.prompts
    assert [TOKENIZER.decode(ids.tolist()) for ids in prompts[::SAMPLES]] == [
        f'<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n' for text in ('abc', 'no')
    ]
    several = 0
    for row, num in enumerate(responses.num_B):
        tokens, is_model = responses.tokens_BR[row, :num], responses.generated[row, :num]
        trajectory = Recorder.seen[row]
        turns = [message['content'] for message in trajectory.messages if message['role'] == 'assistant']
        borders = np.flatnonzero(np.diff(is_model.astype(int), prepend=0, append=0))
        found = [tokens[a:b].tolist() for a, b in borders.reshape(-1, 2)]
        ended = [turn[-1] in (CHAT.end_of_turn, *range(5)) for turn in found]
        assert [TOKENIZER.decode(turn[: len(turn) - end]) for turn, end in zip(found, ended, strict=True)] == turns
        replies = [
            TOKENIZER.decode(tokens[b:c].tolist())
            for (_, b), (c, _) in zip(borders.reshape(-1, 2), borders.reshape(-1, 2)[1:], strict=False)
        ]
        assert replies == [f'\n<|im_start|>user\n{n}<|im_end|>\n<|im_start|>assistant\n' for n in range(1, len(turns))]
        several += len(turns) > 1
        assert responses.environment.scores.rewards[row] == 1.25 * len(trajectory.rewards)
    assert several
    batch = response_rows(config, prompts, responses)
    assert batch['predicted'].sum() == responses.generated.sum() < responses.num_B.sum()
    metrics = environment_metrics(responses, responses.environment.scores)
    assert metrics['rollout/environment_failures'] == 0
    assert metrics['rollout/turns'] > 1


def test_failed_conversations_are_excluded(sampled):
    good, mixed = draw(sampled, 'abc'), draw(sampled, 'abc', 'bad')
    scores = mixed.environment.scores
    assert scores.used.tolist() == [True] * SAMPLES + [False] * SAMPLES
    assert mixed.tokens_BR[:SAMPLES].tolist() == good.tokens_BR.tolist()
    with pytest.raises(InputError, match=r'all 4 conversations failed; .* The first: score raised ValueError: bad'):
        draw(sampled, 'bad')
    with pytest.raises(InputError, match='tokens; at most data'):
        draw(sampled, 'a' * T)


def test_the_first_process_sends_its_results(monkeypatch):
    calls = []

    def fail():
        raise InputError('no network')

    for _ in fake_processes(monkeypatch):
        with pytest.raises(InputError, match='no network'):
            run_in_first_process(fail)
        assert run_in_first_process(lambda: calls.append(1) or {'a': [1.5, 'é']}) == {'a': [1.5, 'é']}
    assert len(calls) == 1


def test_groups_without_their_failed_responses(sampled):
    config, *_ = sampled
    responses = draw(sampled, 'abc')
    prompts, rewards = responses.environment.prompts, np.array([1, 0, 3, 9], np.float32)
    used = np.array([True, True, True, False])
    rows = response_rows(config, prompts, responses)
    batch, _ = with_advantages(config, rows, rewards, used)
    three = rewards[:3]
    expected = (three - three.mean()) / (three.std(ddof=1) + 1e-6)
    for row in range(SAMPLES):
        places = batch['predicted'][row] > 0
        assert batch['advantages'][row, places] == pytest.approx(expected[row] if used[row] else 0)
        assert bool(batch['weights'][row].any()) == used[row]
    assert not with_advantages(config, rows, rewards, np.arange(4) == 1)[0]['weights'].any()


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp('start')
    TOKENIZER.save(directory / 'tokenizer.json')
    (directory / 'chat_template.jinja').write_text(CHATML)
    make_start(directory / 'sft', directory / 'tokenizer.json', model__max_positions=T)
    return directory


def run(start, workdir, **overrides):
    settings = {
        'grpo__environment': 'examples.guess_number:GuessNumber',
        'grpo__environment_args': json.dumps({'high': 7}),
        'grpo__reward': 'exact',
        'grpo__prompts': '',
        'grpo__eval_prompts': '',
        'grpo__max_completion_length': R,
        'grpo__max_turns': 3,
        'grpo__eval_num_prompts': 4,
        'data__seq_len': T,
        'model__vocab_size': 0,
        'model__max_positions': T,
        'train__num_steps': 4,
        **overrides,
    }
    return exit_code(grpo.main, [*grpo_arguments(start, **settings), f'--workdir={workdir}'])


def test_a_run_learns_and_resumes_exactly(start, tmp_path):
    assert run(start, tmp_path / 'whole', grpo__eval_num_generations=2) == EXIT_DONE
    lines = curve(tmp_path / 'whole')
    first = lines[1]
    assert first['rollout/reward'] == pytest.approx(
        first['rollout/reward/found'] + 0.2 * first['rollout/reward/near'], abs=1e-5
    )
    assert first['rollout/environment_failures'] == 0
    assert first['rollout/turns'] > 1
    # The loss covers only tokens of the model, whose probabilities are those of sampling.
    assert first['train/approx_kl'] < 1e-9
    assert {'eval/reward', 'eval/accuracy', 'eval/pass_at_k'} <= lines[4].keys()
    assert lines[4]['eval/loss'] == -lines[4]['eval/reward']
    log = (tmp_path / 'whole/run.log').read_text()
    assert '1 to 7.<|im_end|> <|im_start|>assistant ▮' in log
    assert '(reward ' in log
    # A run that ends after the first rollout and continues ends with the same parameters.
    for steps in (2, 4):
        assert run(start, tmp_path / 'parts', train__num_steps=steps, eval__interval=0) == EXIT_DONE
    assert same(params_of(tmp_path / 'parts', 4), params_of(tmp_path / 'whole', 4))
    # Negative control: other numbers.
    assert run(start, tmp_path / 'other', eval__interval=0, data__seed=1) == EXIT_DONE
    assert not same(params_of(tmp_path / 'other', 4), params_of(tmp_path / 'whole', 4))


def test_failures_are_counted_and_end_a_run_only_if_all_fail(start, tmp_path, monkeypatch, capsys):
    name = write_module(tmp_path, monkeypatch, FLAKY)
    settings = {'grpo__environment': f'{name}:Flaky', 'eval__interval': 0, 'train__num_steps': 1}
    assert run(start, tmp_path / 'some', **settings, grpo__environment_args='{"every": 2}') == EXIT_DONE
    assert 0 < curve(tmp_path / 'some')[1]['rollout/environment_failures'] < 32
    assert 'score raised ConnectionError: no network' in (tmp_path / 'some/run.log').read_text()
    assert run(start, tmp_path / 'all', **settings, grpo__environment_args='{"every": 1}') == EXIT_BAD_INPUT
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert 'all 32 conversations failed; fix the environment. The first: score raised ConnectionError' in error


def test_dynamic_sampling_replaces_conversations(start, tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, FLAKY)
    settings = {'grpo__environment': f'{name}:Flaky', 'grpo__environment_args': '{"every": 2}', 'eval__interval': 0}
    settings |= {'grpo__num_generations': 2, 'grpo__prompts_per_rollout': 8, 'grpo__max_num_gen_batches': 3}
    assert run(start, tmp_path / 'whole', **settings) == EXIT_DONE
    first = curve(tmp_path / 'whole')[1]
    assert first['rollout/num_gen_batches'] > 1
    for steps in (2, 4):
        assert run(start, tmp_path / 'parts', **settings, train__num_steps=steps) == EXIT_DONE
    assert same(params_of(tmp_path / 'parts', 4), params_of(tmp_path / 'whole', 4))


def test_a_value_head_learns_from_conversations(start, tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, FLAKY)
    settings = {'grpo__environment': f'{name}:Flaky', 'grpo__environment_args': '{"every": 2}', 'eval__interval': 0}
    settings |= {'grpo__advantage_estimator': 'gae', 'grpo__kl_coef': 0.1, 'grpo__kl_in_reward': True}
    assert run(start, tmp_path / 'run', **settings) == EXIT_DONE
    lines = curve(tmp_path / 'run')
    assert lines[1]['rollout/environment_failures'] > 0
    # The model is the reference before the first update.
    assert abs(lines[1]['rollout/kl']) < 1e-5
    assert lines[4]['train/value_loss'] > 0


@pytest.mark.parametrize(
    ('overrides', 'words'),
    [
        ({'grpo__environment': 'guess'}, "grpo.environment='guess' is not the name of a class"),
        ({'grpo__environment': 'nowhere:Guess'}, "environment nowhere:Guess: no module 'nowhere'"),
        ({'grpo__environment': 'examples.guess_number:GuessNumbr'}, "did you mean 'GuessNumber'?"),
        ({'grpo__environment': 'fractions:Fraction'}, 'Fraction has no method reset(example, seed); define it'),
        ({'grpo__environment_args': '{"low": 1}'}, 'must accept the arguments (low)'),
        ({'grpo__environment_args': '[1]'}, 'must be a JSON object'),
        ({'grpo__environment': ''}, 'grpo.environment_args=\'{"high": 7}\' has no effect'),
        ({'grpo__reward': 'length'}, "grpo.reward='length' has no effect with grpo.environment"),
        ({'grpo__soft_punish_cache': 4}, 'grpo.soft_punish_cache=4 has no effect with grpo.environment'),
        ({'grpo__prompts': '/nowhere.jsonl'}, '/nowhere.jsonl'),
        ({'grpo__prompts_per_rollout': 80}, 'has only 64 prompts'),
    ],
)
def test_bad_input_is_one_line(start, tmp_path, capsys, overrides, words):
    if overrides.get('grpo__environment') == 'fractions:Fraction':
        overrides = overrides | {'grpo__environment_args': ''}
    assert run(start, tmp_path / 'run', **overrides) == EXIT_BAD_INPUT
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith('error: ')
    assert words in error
