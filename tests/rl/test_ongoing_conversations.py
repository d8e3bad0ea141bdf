"""Conversations that are generated while the devices train: order of turns, checkpoints, resume and failures."""

import threading
import types

import numpy as np
import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.tokenizer import chars_tokenizer
from maxlm.rl import rollouts
from maxlm.rl.generation import turns
from maxlm.rl.generation.environment_sampler import Environments, seeded_examples
from maxlm.rl.generation.responses import Responses
from maxlm.rl.rewards.prompts import Prompts
from maxlm.rl.rollouts import RolloutBatches
from maxlm.training.batch import OLD_VALUES
from tests.small import small_config, small_layout
from tests.waiting import until

TOKENIZER = chars_tokenizer(['\n0123456789abcdefghijklmnopqrstuvwxyz']).with_special_tokens(
    ['<|im_start|>', '<|im_end|>']
)
CHAT = ChatEncoder(TOKENIZER, ChatTemplate(CHATML, name='test'))
LETTERS = TOKENIZER.encode_batch(['abcdef'])[0]
T, R, ROWS, NUM_ROLLOUTS, MAX_TURNS = 200, 160, 4, 6, 4
TIMEOUT_SECONDS = 60


class Sampler:
    """Draws turns of random letters, which depend on the parameters, the row and the position, and records calls."""

    def __init__(self):
        self.events = []

    def __call__(self, params, prompts, *, seed, first_row, num_samples):
        texts = [prompt for prompt in prompts for _ in range(num_samples)]
        rows = list(range(first_row, first_row + len(texts)))
        return self.resume(params, texts, seed=seed, rows=rows, limits=[R] * len(rows))

    def resume(self, params, texts, *, seed, rows, limits, temperature=1.0, rows_per_run=0):
        self.events.append((rows[0] // ROWS, params))
        tokens, log_probs = np.zeros((len(rows), R), np.int32), np.zeros((len(rows), R), np.float32)
        num = np.zeros(len(rows), np.int32)
        for index, (text, row, limit) in enumerate(zip(texts, rows, limits, strict=True)):
            rng = np.random.default_rng([seed, params, row, len(text)])
            letters = LETTERS[rng.integers(0, len(LETTERS), rng.integers(0, 4))].tolist()
            turn = [*letters, CHAT.end_of_turn][:limit]
            num[index] = len(turn)
            tokens[index, : len(turn)] = turn
            log_probs[index, : len(turn)] = -rng.random(len(turn))
        ended = tokens[np.arange(len(rows)), num - 1] == CHAT.end_of_turn
        return Responses(tokens, log_probs, num, ended, int(num.max()))


class Talk:
    """Answers each turn with its length and rewards it, and ends after an empty turn or `MAX_TURNS` turns."""

    fails, changes = False, False
    # Seeds of conversations whose methods wait for the event.
    slow_steps, slow_scores, event = frozenset(), frozenset(), threading.Event()
    created, closed = 0, 0

    def __init__(self):
        Talk.created += 1
        self.answered = 0

    def reset(self, example, seed):
        self.seed = seed
        return [{'role': 'user', 'content': f'say {seed % 97} {example["text"]}'}]

    async def step(self, messages):
        if self.seed in Talk.slow_steps:
            assert Talk.event.wait(TIMEOUT_SECONDS)
        self.answered += 1
        text = messages[-1]['content']
        if Talk.fails and text.startswith('a') and self.answered == 2:
            raise ConnectionError('no network')
        answer = f'{len(text) + self.answered + Talk.changes}'
        return [{'role': 'user', 'content': answer}], -0.5 * len(text), not text

    def score(self, trajectory):
        if self.seed in Talk.slow_scores:
            assert Talk.event.wait(TIMEOUT_SECONDS)
        assert self.answered == len(trajectory.rewards)
        # The names depend on the conversation.
        found = {'turns': len(trajectory.rewards), 'letters': sum(len(one['content']) for one in trajectory.messages)}
        return found | ({'even': 1.0} if found['letters'] % 2 == 0 else {})

    def close(self):
        Talk.closed += 1


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Returns a function that opens rollouts of two steps each, and returns them and their sampler."""
    for name, value in {'fails': False, 'changes': False, 'created': 0, 'closed': 0}.items():
        monkeypatch.setattr(Talk, name, value)
    opened = []

    def make(k, **overrides):
        sampler = Sampler()
        monkeypatch.setattr(rollouts, 'Sampler', lambda *_, **__: sampler)
        monkeypatch.setattr(turns, 'ContinuationSampler', lambda *_, **__: sampler)
        monkeypatch.setattr(rollouts, 'make_passes', lambda *_: None)
        config = small_config(
            **{
                'data__seq_len': T,
                'train__objective': 'grpo',
                'train__num_steps': 2 * NUM_ROLLOUTS,
                'train__global_batch_size': 2,
                'grpo__num_generations': 2,
                'grpo__prompts_per_rollout': 2,
                'grpo__max_completion_length': R,
                'grpo__environment': 'tests:Talk',
                'grpo__max_turns': MAX_TURNS,
                'grpo__max_staleness': k,
                'model__max_positions': T,
                **overrides,
            }
        )
        TOKENIZER.save(tmp_path / 'tokenizer.json')
        examples = tuple({'text': letter} for letter in 'xyz')
        source = RolloutBatches(
            config,
            prompts=Prompts('examples', (np.zeros(0, np.uint32),) * 3, examples, (1, 2, 3), 0),
            eval_prompts=None,
            scorer=None,
            tokenizer_path=tmp_path / 'tokenizer.json',
            ends=(CHAT.end_of_turn,),
            environments=Environments(Talk, CHAT),
        )
        source.open(config, small_layout(config))
        opened.append(source)
        return source, sampler

    yield make
    for source in opened:
        source.close()


def prepare(source, step):
    """Prepares the rollout before a step by parameters that are the number of updates; returns its metrics."""
    metrics = source.prepare(step, types.SimpleNamespace(params=step - 1)).metrics
    return {name: value for name, value in metrics.items() if not name.endswith('seconds') and 'per_second' not in name}


def run(source, first=0, last=NUM_ROLLOUTS):
    """Returns the metrics and the two batches of each rollout."""
    found = []
    for number in range(first, last):
        source._batches.clear()
        found.append((prepare(source, 2 * number + 1), list(source._batches)))
    return found


@pytest.mark.parametrize('k', [1, 2, 4])
def test_turns_are_generated_in_a_fixed_order(make, k):
    source, sampler = make(k)
    whole = run(source)
    by_rollout = [[params for one, params in sampler.events if one == number] for number in range(NUM_ROLLOUTS)]
    for number, params in enumerate(by_rollout):
        begun, complete = max(0, number - k), max(0, number - 1)
        # One turn before the training on each rollout, and the remaining ones before that on the previous rollout.
        expected = [2 * one for one in range(begun, complete)]
        assert params == [*expected, *[2 * complete] * (len(params) - len(expected))][: len(params)]
        assert len(params) > 1
    assert [metrics['rollout/staleness'] for metrics, _ in whole] == [2 * min(n, k) for n in range(NUM_ROLLOUTS)]
    assert source.state_arrays() == {}
    assert Talk.created == Talk.closed == ROWS * NUM_ROLLOUTS


@pytest.mark.parametrize('fails', [False, True])
@pytest.mark.parametrize('k', [1, 2, 4])
def test_a_resumed_run_equals_an_uninterrupted_one(make, monkeypatch, k, fails):
    monkeypatch.setattr(Talk, 'fails', fails)
    whole = run(make(k)[0])
    assert any(metrics['rollout/environment_failures'] for metrics, _ in whole) == fails
    for stop in (1, 2, 4):
        for is_scored in (False, True):
            source, _ = make(k)
            if not is_scored:
                # The checkpoint contains no scores.
                monkeypatch.setattr(source._pending, '_executor', None)
            begun = run(source, last=stop)
            if is_scored:
                for entry in source._pending._queue:
                    entry.future and entry.future.result(TIMEOUT_SECONDS)
            arrays = source.state_arrays()
            complete = arrays['complete'].tolist()
            assert arrays['numbers'][:, 3].tolist() == [one and is_scored for one in complete]
            assert complete[0]
            resumed, sampler = make(k)
            resumed.load_state_arrays({name: array.copy() for name, array in arrays.items()})
            found = begun + run(resumed, first=stop)
            # Recorded turns are not generated again.
            assert (stop, 2 * stop) not in sampler.events
            np.testing.assert_equal(found, whole)
    # Negative control: other parameters give other batches.
    assert not np.array_equal(whole[1][1][0]['tokens'], whole[2][1][0]['tokens'])


def test_environments_answer_and_score_during_the_training(make, monkeypatch):
    source, sampler = make(3)
    starts = seeded_examples([{}] * 8, seed=source._config.data.seed)
    monkeypatch.setattr(Talk, 'event', threading.Event())
    # Rollout 1 has no scores and the rollouts 2 and 3 have no answers before the event.
    monkeypatch.setattr(Talk, 'slow_scores', {start.seed for start in starts[2:4]})
    monkeypatch.setattr(Talk, 'slow_steps', {start.seed for start in starts[4:8]})
    prepare(source, 1)
    assert [number for number, _ in sampler.events[-2:]] != [2, 3]
    assert {(2, 0), (3, 0)} <= set(sampler.events)
    arrays = source.state_arrays()
    assert arrays['numbers'][:, 0].tolist() == [1, 2, 3]
    assert arrays['numbers'][:, 3].tolist() == [0, 0, 0]
    assert arrays['complete'].tolist() == [True, False, False]
    # Negative control: the training on rollout 1 needs the event.
    thread = threading.Thread(target=lambda: prepare(source, 3))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    Talk.event.set()
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()


def saved(make, monkeypatch, k, stop):
    """Returns the arrays of a checkpoint without scores."""
    source, _ = make(k)
    monkeypatch.setattr(source._pending, '_executor', None)
    run(source, last=stop)
    return source.state_arrays()


def test_conversations_whose_environment_answers_differently_fail(make, monkeypatch):
    arrays = saved(make, monkeypatch, 3, 2)
    for changes in (False, True):
        monkeypatch.setattr(Talk, 'changes', changes)
        resumed, _ = make(3)
        resumed.load_state_arrays(arrays)
        failures = [metrics['rollout/environment_failures'] for metrics, _ in run(resumed, first=2)]
        # The checkpoint contains answers of the rollouts 2 and 3, and of rollout 4 only the first turn of the model.
        assert [count > 0 for count in failures] == [changes, changes, False, False]


@pytest.mark.parametrize('k', [0, 1, 2, 4])
def test_a_run_continues_with_another_limit(make, monkeypatch, k):
    for stop in (0, 2):
        arrays = saved(make, monkeypatch, 3, stop) if stop else {}
        resumed, _ = make(k)
        resumed.load_state_arrays(arrays)
        lines = [metrics for metrics, _ in run(resumed, first=stop)]
        assert max(line['rollout/staleness'] for line in lines) <= 2 * k if k else 'rollout/staleness' not in lines[0]
        assert lines[-1]['rollout/turns'] > 1


def test_a_run_without_staleness_repeats_unscored_conversations(make, monkeypatch):
    """A run whose first rollout could not be scored has saved it."""
    source, _ = make(1)
    monkeypatch.setattr(source._pending, 'first', lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(source, 1)
    arrays = source.state_arrays()
    arrays['numbers'][:, 3] = 0
    assert arrays['numbers'][:, :2].tolist() == [[0, 0], [1, 0]]
    synchronous, sampler = make(0)
    synchronous.load_state_arrays(arrays)
    assert prepare(synchronous, 1)['rollout/environment_failures'] == 0
    assert (0, 0) in sampler.events


def test_the_end_of_a_run_closes_environments(make):
    source, _ = make(2)
    run(source, last=2)
    assert Talk.closed < Talk.created
    source.close()
    # Another thread may still create environments of the next rollout.
    until(lambda: Talk.closed == Talk.created)


def test_the_time_of_environments_is_counted(make):
    source, _ = make(2)
    for number in range(3):
        update = source.prepare(2 * number + 1, types.SimpleNamespace(params=number))
        metrics = update.metrics
        assert update.waits == {
            'reward_wait': metrics['rollout/reward_wait_seconds'],
            'tool_wait': metrics['rollout/tool_wait_seconds'],
        }
        assert metrics['rollout/tool_wait_seconds'] > 0
        assert metrics['rollout/hidden_tool_seconds'] >= 0


def test_a_rollout_may_be_a_single_conversation(make, monkeypatch):
    """PPO needs no group, so the log shows fewer responses than usual."""
    settings = {'train__global_batch_size': 1, 'grpo__num_generations': 1, 'grpo__prompts_per_rollout': 1}
    source, _ = make(0, grpo__advantage_estimator='gae', **settings)
    values = {OLD_VALUES: np.zeros((1, T), np.float32)}
    monkeypatch.setattr(source, '_passes', lambda state, batch: values)
    update = source.prepare(1, types.SimpleNamespace(params=0))
    assert len(update.samples) == 1
    assert len(source._batches) == 1
