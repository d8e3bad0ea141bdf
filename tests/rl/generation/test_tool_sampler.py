"""Tests responses with tool calls: tokens, random keys, limits, masks and log-probabilities."""

import jax
import numpy as np
import pytest

from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.rl.generation.tool_environment import Reply
from maxlm.rl.generation.tool_sampler import ToolSampler, tool_metrics
from maxlm.rl.generation.turns import TurnSampler
from maxlm.rl.rollout_batch import response_rows, with_advantages
from maxlm.training.forward import make_log_probs
from maxlm.training.state import init_state
from tests.small import small_config, small_layout

T, R, MAX_CALLS = 40, 26, 3
PROMPTS = [[3, 5, 7], [11], [2, 4, 6, 8, 10, 12, 14]]
SAMPLES = 4
RESULT = [20, 21, 22]
# A turn that ends with CALL calls a tool.
CALL, ENDS = 13, (1, 2, 4, 13, 30, 40)


class Calculator:
    """Environment whose result follows each turn that ends with CALL; its length is that of the turn, up to 3."""

    def __init__(self):
        self.most = []

    def replies(self, rows, turns, max_calls):
        self.most.append(list(max_calls))
        assert all(turn and turn[-1] in ENDS for turn in turns)
        return [
            Reply(RESULT[: len(turn)], 1, len(turn) % 2) if turn[-1] in (CALL, 1, 2) and most else None
            for turn, most in zip(turns, max_calls, strict=True)
        ]


@pytest.fixture(scope='module')
def sampled():
    config = small_config(
        data__seq_len=T,
        train__global_batch_size=4,
        grpo__num_generations=SAMPLES,
        grpo__max_completion_length=R,
        grpo__max_tool_calls=MAX_CALLS,
        grpo__loss_type='gspo',
        model__max_positions=T,
        model__init_std=0.3,
    )
    layout = small_layout(config)
    params = init_state(config, layout).params
    first = Sampler(config, layout, ends=ENDS, max_prompt=T - R, max_tokens=R)
    environment = Calculator()
    sampler = ToolSampler(TurnSampler(first, config, layout, ends=ENDS), environment)
    responses = sampler(params, PROMPTS, seed=0, first_row=8, num_samples=SAMPLES)
    return config, layout, params, sampler, responses, environment


def rows_of(responses):
    """Yields the tokens of each row as [token, whether it is generated]."""
    for row, num in enumerate(responses.num_B):
        yield list(zip(responses.tokens_BR[row, :num].tolist(), responses.generated[row, :num].tolist(), strict=True))


def test_results_follow_the_turns_with_calls(sampled):
    *_, responses, environment = sampled
    calls = []
    for row in rows_of(responses):
        runs = [[]]
        for token, is_generated in row:
            if not is_generated or (runs[-1] and runs[-1][-1] in ENDS):
                runs.append([]) if is_generated else None
            if is_generated:
                runs[-1].append(token)
        turns = [run for run in runs if run]
        results = [token for token, is_generated in row if not is_generated]
        assert results == [token for turn in turns[:-1] for token in RESULT[: len(turn)]]
        assert all(turn[-1] in (CALL, 1, 2) for turn in turns[:-1])
        calls.append(len(turns) - 1)
    assert max(calls) >= 2
    assert min(calls) == 0
    assert (responses.tools.num_calls_B >= calls).all()
    assert responses.tools.num_calls_B.max() <= MAX_CALLS
    assert environment.most[0] == [MAX_CALLS] * len(environment.most[0])
    assert (responses.num_B <= R).all()
    ended = [row[-1][0] in ENDS for row in rows_of(responses)]
    assert responses.ended_B.tolist() == ended
    assert not responses.tokens_BR[np.arange(R) >= responses.num_B[:, None]].any()
    metrics = tool_metrics(responses)
    assert metrics['rollout/tool_calls'] == responses.tools.num_calls_B.mean()
    assert 0 < metrics['rollout/tool_errors'] < 1


def test_continuations_equal_samples_of_the_complete_text(sampled):
    config, layout, params, _, responses, _ = sampled
    alone = Sampler(config, layout, ends=ENDS, max_prompt=T - 2, max_tokens=2)
    continued = np.flatnonzero((responses.last_turns > 0) & (responses.num_B - responses.last_turns >= 2))
    assert len(continued)
    for row in continued[:3]:
        start = responses.last_turns[row]
        text = [*PROMPTS[row // SAMPLES], *responses.tokens_BR[row, :start].tolist()]
        expected = responses.tokens_BR[row, start : start + 2].tolist()
        found = alone(params, [text], seed=0, first_row=8 + int(row))
        assert found.tokens_BR[0].tolist() == expected
        assert np.abs(found.log_probs_BR[0] - responses.log_probs_BR[row, start : start + 2]).max() < 1e-4


def test_a_row_does_not_depend_on_others(sampled):
    *_, params, sampler, responses, _ = sampled
    found = sampler(params, PROMPTS[1:], seed=0, first_row=8 + SAMPLES, num_samples=SAMPLES)
    assert found.tokens_BR.tolist() == responses.tokens_BR[SAMPLES:].tolist()
    # Negative control: other rows have other keys.
    other = sampler(params, PROMPTS[1:], seed=0, first_row=0, num_samples=SAMPLES)
    assert found.tokens_BR.tolist() != other.tokens_BR.tolist()


def test_the_step_recomputes_log_probabilities_of_generated_tokens_only(sampled):
    config, layout, params, _, responses, _ = sampled
    prompts = [np.array(prompt, np.uint32) for prompt in PROMPTS for _ in range(SAMPLES)]
    rewards = np.arange(len(prompts), dtype=np.float32)
    batch, _ = with_advantages(config, response_rows(config, prompts, responses), rewards)
    placed = layout.put_batch(batch, len(prompts))
    found = np.asarray(jax.jit(make_log_probs(config, layout))(params, None, placed, None).log_probs_BT)
    predicted = batch['predicted'] > 0
    assert predicted.sum() == responses.drawn == responses.generated.sum() < responses.num_B.sum()
    assert np.abs(found - batch['old_log_probs'])[predicted].max() < 1e-4
    assert np.abs(found - np.roll(batch['old_log_probs'], 1, axis=1))[predicted].max() > 0.1
    for row, prompt in enumerate(prompts):
        places = np.arange(responses.num_B[row]) + len(prompt) - 1
        is_generated = responses.generated[row, : responses.num_B[row]]
        assert batch['targets'][row, places].tolist() == responses.tokens_BR[row, : responses.num_B[row]].tolist()
        assert predicted[row, places].tolist() == is_generated.tolist()
        # Weights of a response add up to 1 without those of results.
        assert batch['weights'][row].sum() == pytest.approx(1, abs=1e-5)
        assert not batch['weights'][row, places[~is_generated]].any()
