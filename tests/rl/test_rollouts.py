"""Order of generation, rewards and steps in synchronous and asynchronous GRPO."""

import json
import threading
import types

import numpy as np
import pytest

from maxlm.data.tokenizer.tokenizer import chars_tokenizer
from maxlm.errors import InputError
from maxlm.rl import rollouts
from maxlm.rl.generation.responses import Responses
from maxlm.rl.rewards.prompts import read_prompts
from maxlm.rl.rewards.rewards import UserRewardError
from maxlm.rl.rewards.scorer import Scores
from maxlm.rl.rollouts import RolloutBatches
from maxlm.training.batch import PROXIMAL
from tests.small import small_config, small_layout

T, R, ROWS, NUM_ROLLOUTS = 12, 4, 4, 6
# Time after which a test fails that waits for the other thread.
TIMEOUT_SECONDS = 60


class Fakes:
    """A sampler, whose tokens are the number of the rollout, and a scorer. Both record their calls.

    With `overlap`, a rollout is not scored before the `overlap`-th next one has been generated, so a loop that waits
    for the scores earlier would time out.
    """

    def __init__(self, *, overlap):
        self.events, self.scored = [], []
        self.is_generated = [threading.Event() for _ in range(NUM_ROLLOUTS)]
        self._overlap = overlap
        self.error = None

    def __call__(self, params, prompts, *, seed, first_row, num_samples):
        number = first_row // ROWS
        self.events.append(f'generate {number} by {params}')
        self.is_generated[number].set()
        log_probs = np.full((ROWS, R), -1, np.float32)
        return Responses(np.full((ROWS, R), number, np.int32), log_probs, np.full(ROWS, R), np.zeros(ROWS, bool), R)

    def score(self, responses, tasks, *, reward, by_tokens):
        number = int(responses[0][0])
        if self._overlap:
            assert self.is_generated[min(number + self._overlap, NUM_ROLLOUTS - 1)].wait(TIMEOUT_SECONDS)
        self.scored.append(number)
        if self.error:
            raise self.error
        rewards = np.arange(len(responses), dtype=np.float32)
        return Scores(rewards, {'length': rewards}, np.zeros_like(rewards))


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Returns a function that opens rollouts of two steps each, and returns them and their fakes."""

    def make(*, overlap=0, global_batch_size=2, **overrides):
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


def generated_by(events):
    """Returns the parameters that generated each rollout."""
    found = [event.split() for event in events if event.startswith('generate')]
    assert [int(words[1]) for words in found] == list(range(NUM_ROLLOUTS))
    return [int(words[3].removeprefix('θ')) for words in found]


def test_synchronous_rollouts_use_the_newest_parameters(make):
    source, fakes = make()
    metrics = run(source, fakes.events)
    assert fakes.events[:6] == [
        *('generate 0 by θ0', 'step 1', 'step 2'),
        *('generate 1 by θ2', 'step 3', 'step 4'),
    ]
    assert generated_by(fakes.events) == [0, 2, 4, 6, 8, 10]
    assert fakes.scored == list(range(NUM_ROLLOUTS))
    assert 'rollout/staleness' not in metrics[0]
    assert source.state_arrays() == {}


@pytest.mark.parametrize('k', [1, 2, 4])
def test_staleness_is_bounded_and_does_not_depend_on_times(make, k):
    expected = [2 * max(0, number - k) for number in range(NUM_ROLLOUTS)]
    for overlap in (0, k):
        source, fakes = make(overlap=overlap, grpo__max_staleness=k)
        metrics = run(source, fakes.events)
        assert generated_by(fakes.events) == expected
        assert [line['rollout/staleness'] for line in metrics] == [
            2 * number - step for number, step in enumerate(expected)
        ]
        assert max(line['rollout/staleness'] for line in metrics) == 2 * k
        # Rollout k is generated before the first step.
        assert fakes.events[k : k + 2] == [f'generate {k} by θ0', 'proximal θ0']
        assert fakes.scored == list(range(NUM_ROLLOUTS))
        # No rollout follows the last one.
        assert source.state_arrays() == {}


def test_the_ledger_of_a_rollout(make):
    source, fakes = make(overlap=1, grpo__max_staleness=1)
    lines = run(source, fakes.events)
    for line in lines:
        assert line['rollout/generate_seconds'] > 0
        assert line['rollout/reward_wait_seconds'] >= 0
        hidden = line['rollout/reward_seconds'] - line['rollout/reward_wait_seconds']
        assert line['rollout/hidden_reward_seconds'] == max(0, hidden)
    # The rewards of a rollout end after the generation of the next one, which therefore hides most of them.
    assert sum(line['rollout/hidden_reward_seconds'] for line in lines) > 0


def test_one_step_per_rollout_needs_no_proximal_pass(make):
    source, fakes = make(grpo__max_staleness=1, global_batch_size=ROWS)
    prepare(source, 1)
    assert fakes.events == ['generate 0 by θ0', 'generate 1 by θ0']


@pytest.mark.parametrize('k', [1, 2, 4])
@pytest.mark.parametrize('is_scored', [False, True])
def test_a_checkpoint_contains_the_pending_rollouts(make, k, is_scored):
    source, fakes = make(grpo__max_staleness=k)
    prepare(source, 1)
    if is_scored:
        # The thread scores them in their order.
        last = source._pending._queue[-1]
        last.future.result(TIMEOUT_SECONDS)
    else:
        for entry in source._pending._queue:
            entry.future = None
    arrays = source.state_arrays()
    assert arrays['numbers'].tolist() == [[number, 0, R, is_scored] for number in range(1, k + 1)]
    resumed, fakes = make(grpo__max_staleness=k)
    resumed.load_state_arrays(arrays)
    assert prepare(resumed, 3)['rollout/staleness'] == 2
    assert fakes.events == [f'generate {k + 1} by θ2', 'proximal θ2']
    resumed._pending._queue[-1].future.result(TIMEOUT_SECONDS)
    # Known scores are not computed again.
    assert fakes.scored == [*(() if is_scored else range(1, k + 1)), k + 1]


def test_rollouts_of_another_limit_are_used_while_they_are_new_enough(make):
    source, _ = make(grpo__max_staleness=2)
    prepare(source, 1)
    arrays = source.state_arrays()
    # Rollouts 1 and 2 were generated by θ0. Rollout 2 is generated again, because it would be two rollouts old.
    lower, fakes = make(grpo__max_staleness=1)
    lower.load_state_arrays(arrays)
    assert prepare(lower, 3)['rollout/staleness'] == 2
    assert fakes.events[0] == 'generate 2 by θ2'
    higher, fakes = make(grpo__max_staleness=4)
    higher.load_state_arrays(arrays)
    prepare(higher, 3)
    assert fakes.events[:3] == [f'generate {number} by θ2' for number in (3, 4, 5)]
    # Responses of a rollout that is over are not used, and a synchronous run uses none.
    other, fakes = make(grpo__max_staleness=1)
    other.load_state_arrays(arrays)
    assert prepare(other, 7)['rollout/staleness'] == 0
    synchronous, fakes = make()
    synchronous.load_state_arrays(arrays)
    prepare(synchronous, 3)
    assert fakes.events[0] == 'generate 1 by θ2'


def test_a_checkpoint_after_a_failed_reward_contains_the_same_responses(make):
    # Rollout 1 is scored after the generation of rollout 2.
    source, fakes = make(overlap=1, grpo__max_staleness=1)
    prepare(source, 1)
    before = source.state_arrays()
    fakes.error = UserRewardError('the reward failed', source._prompts.tasks[0])
    with pytest.raises(InputError, match=r'prompts\.jsonl:1: the reward failed'):
        prepare(source, 3)
    arrays = source.state_arrays()
    # The rollout whose reward failed is the first one, without scores.
    assert arrays['numbers'].tolist() == [[1, 0, R, 0], [2, 2, R, 0]]
    for name in ('tokens', 'log_probs', 'lengths', 'ended'):
        np.testing.assert_array_equal(arrays[name][0], before[name][0])
    resumed, fakes = make(grpo__max_staleness=1)
    resumed.load_state_arrays(arrays)
    assert prepare(resumed, 3)['rollout/staleness'] == 2
    assert fakes.events == ['proximal θ2']
