"""Order of generation, rewards and steps in synchronous and asynchronous GRPO."""

import json
import threading
import types

import numpy as np
import pytest

from maxlm.data.tokenizer.tokenizer import chars_tokenizer
from maxlm.errors import InputError
from maxlm.rl import rollouts
from maxlm.rl.responses import Responses
from maxlm.rl.rewards.prompts import read_prompts
from maxlm.rl.rewards.rewards import UserRewardError
from maxlm.rl.rewards.scorer import Scores
from maxlm.rl.rollouts import RolloutBatches
from maxlm.training.batch import PROXIMAL
from tests.small import small_config, small_layout

T, R, ROWS, NUM_ROLLOUTS = 12, 4, 4, 3
# Time after which a test fails that waits for the other thread.
TIMEOUT_SECONDS = 60


class Fakes:
    """A sampler, whose tokens are the number of the rollout, and a scorer. Both record their calls.

    With `overlap`, a rollout is not generated before the previous one is being scored, and not scored before the next
    one is being generated. A sequential loop would time out.
    """

    def __init__(self, *, overlap):
        self.events = []
        self.is_generating, self.is_scoring = ([threading.Event() for _ in range(NUM_ROLLOUTS)] for _ in range(2))
        self._overlap = overlap
        self.error = None

    def __call__(self, params, prompts, *, seed, first_row, num_samples):
        number = first_row // ROWS
        self.events.append(f'generate {number} by {params}')
        self.is_generating[number].set()
        if self._overlap and number:
            assert self.is_scoring[number - 1].wait(TIMEOUT_SECONDS)
        log_probs = np.full((ROWS, R), -1, np.float32)
        return Responses(np.full((ROWS, R), number, np.int32), log_probs, np.full(ROWS, R), np.zeros(ROWS, bool), R)

    def score(self, responses, tasks, *, reward, by_tokens):
        number = int(responses[0][0])
        self.is_scoring[number].set()
        if self._overlap and number + 1 < NUM_ROLLOUTS:
            assert self.is_generating[number + 1].wait(TIMEOUT_SECONDS)
        self.events.append(f'score {number}')
        if self.error:
            raise self.error
        rewards = np.arange(len(responses), dtype=np.float32)
        return Scores(rewards, {}, np.zeros_like(rewards))


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Returns a function that opens rollouts of two steps each, and returns them and their fakes."""

    def make(*, overlap=False, global_batch_size=2, **overrides):
        config = small_config(
            data__seq_len=T,
            train__objective='grpo',
            train__num_steps=2 * NUM_ROLLOUTS,
            train__global_batch_size=global_batch_size,
            grpo__num_generations=2,
            grpo__prompts_per_rollout=2,
            grpo__max_completion_length=R,
            grpo__reward='length',
            **overrides,
        )
        tokenizer = chars_tokenizer(['0123456789'])
        tokenizer.save(tmp_path / 'tokenizer.json')
        (tmp_path / 'prompts.jsonl').write_text('\n'.join(json.dumps({'prompt': digit}) for digit in '4567'))
        prompts = read_prompts(str(tmp_path / 'prompts.jsonl'), tokenizer, T - R)
        fakes = Fakes(overlap=overlap)

        def passes(state, rows):
            fakes.events.append(f'proximal {state.params}')
            return {PROXIMAL: rows['predicted']}

        monkeypatch.setattr(rollouts, 'Sampler', lambda *_, **__: fakes)
        monkeypatch.setattr(rollouts, 'make_passes', lambda config, _: passes if config.has_proximal else None)
        tokenizer_path = tmp_path / 'tokenizer.json'
        source = RolloutBatches(
            config, prompts=prompts, eval_prompts=None, scorer=fakes, tokenizer_path=tokenizer_path, ends=(1,)
        )
        source.open(config, small_layout(config))
        return source, fakes

    return make


def prepare(source, step):
    """Prepares the rollout before a step. The parameters are the text θ with the number of updates."""
    return source.prepare(step, types.SimpleNamespace(params=f'θ{step - 1}')).metrics


def run(source, events):
    """Prepares all rollouts, trains on them, and returns the metrics."""
    metrics = []
    with source.batches(0, None, None, layout=None, alarm=None, on_wait=None) as batches:
        for step in range(1, 2 * NUM_ROLLOUTS + 1):
            if source.has_work_before(step):
                metrics.append(prepare(source, step))
            next(batches)
            events.append(f'step {step}')
    return metrics


def test_synchronous_rollouts_use_the_newest_parameters(make):
    source, fakes = make()
    metrics = run(source, fakes.events)
    assert fakes.events == [
        *('generate 0 by θ0', 'score 0', 'step 1', 'step 2'),
        *('generate 1 by θ2', 'score 1', 'step 3', 'step 4'),
        *('generate 2 by θ4', 'score 2', 'step 5', 'step 6'),
    ]
    assert 'rollout/staleness' not in metrics[0]
    assert source.state_arrays() == {}


def test_asynchronous_rollouts_are_generated_during_the_rewards(make):
    source, fakes = make(overlap=True, grpo__async_rollouts=True)
    metrics = run(source, fakes.events)
    assert fakes.events == [
        'generate 0 by θ0',
        # Steps start when the generation has ended, because they donate the parameters.
        *('generate 1 by θ0', 'score 0', 'proximal θ0', 'step 1', 'step 2'),
        *('generate 2 by θ2', 'score 1', 'proximal θ2', 'step 3', 'step 4'),
        *('score 2', 'proximal θ4', 'step 5', 'step 6'),
    ]
    assert [line['rollout/staleness'] for line in metrics] == [0, 2, 2]
    assert all(line['rollout/hidden_reward_seconds'] > 0 for line in metrics[:2])
    # The last rollout has no next one.
    assert source.state_arrays() == {}


def test_rewards_are_computed_while_the_previous_step_runs(make):
    source, fakes = make(overlap=True, grpo__async_rollouts=True)

    class RunningParams(str):
        def block_until_ready(self):
            assert fakes.is_scoring[1].wait(TIMEOUT_SECONDS)
            fakes.events.append('the step ends')

    prepare(source, 1)
    update = source.prepare(3, types.SimpleNamespace(params=RunningParams('θ2')))
    assert fakes.events[4:] == ['the step ends', 'generate 2 by θ2', 'score 1', 'proximal θ2']
    assert 0 < update.overlap < update.metrics['rollout/reward_seconds']


def test_one_step_per_rollout_needs_no_proximal_pass(make):
    source, fakes = make(grpo__async_rollouts=True, global_batch_size=ROWS)
    prepare(source, 1)
    assert sorted(fakes.events) == ['generate 0 by θ0', 'generate 1 by θ0', 'score 0']


def test_a_checkpoint_contains_the_next_responses(make):
    source, _ = make(grpo__async_rollouts=True)
    prepare(source, 1)
    resumed, fakes = make(grpo__async_rollouts=True)
    resumed.load_state_arrays(source.state_arrays())
    assert prepare(resumed, 3)['rollout/staleness'] == 2
    assert sorted(fakes.events[:2]) == ['generate 2 by θ2', 'score 1']
    # Responses of another rollout are not used.
    other, fakes = make(grpo__async_rollouts=True)
    other.load_state_arrays(source.state_arrays())
    assert prepare(other, 5)['rollout/staleness'] == 0
    assert fakes.events[0] == 'generate 2 by θ4'
    # A synchronous run does not use them either.
    synchronous, fakes = make()
    synchronous.load_state_arrays(source.state_arrays())
    prepare(synchronous, 3)
    assert fakes.events == ['generate 1 by θ2', 'score 1']


def test_a_checkpoint_after_a_failed_reward_contains_the_same_responses(make):
    source, fakes = make(grpo__async_rollouts=True)
    prepare(source, 1)
    before = source.state_arrays()
    assert before['numbers'][0] == 1
    fakes.error = UserRewardError('the reward failed', source._prompts.tasks[0])
    with pytest.raises(InputError, match='the reward failed'):
        prepare(source, 3)
    for name, array in source.state_arrays().items():
        np.testing.assert_array_equal(array, before[name])
