"""Tests the form of rollouts in a checkpoint."""

import numpy as np
import pytest

from maxlm.planning.estimate.state_bytes import checkpoint_bytes, pending_bytes
from maxlm.rl.generation.responses import Responses, ToolUse
from maxlm.rl.rewards.scorer import Scores
from maxlm.rl.rollout_state import Rollout, from_arrays, to_arrays
from tests.small import small_config

NAMES = ('exact', 'my_rewards:brevity')


def rollout(number, lengths, *, has_tools):
    rng = np.random.default_rng(number)
    tokens, log_probs = rng.integers(1, 9, (2, 5)), rng.normal(size=(2, 5)).astype(np.float32)
    for row, length in enumerate(lengths):
        tokens[row, length:] = log_probs[row, length:] = 0
    tools = ToolUse(rng.random((2, 5)) < 0.5, np.array([number, 1]), np.array([0, number])) if has_tools else None
    responses = Responses(tokens, log_probs, np.array(lengths), np.array([True, False]), 4 + number, tools)
    return Rollout(number, 7 * number, responses, 0.5 * number)


@pytest.mark.parametrize('has_tools', [False, True])
def test_the_arrays_of_rollouts_are_complete(has_tools):
    scores = Scores(*(np.array(values, np.float32) for values in ([1, 0.5], [0.25, 2], [0, 1])))
    scores = scores._replace(components=dict(zip(NAMES, (scores.components, scores.rewards), strict=True)))
    rollouts = [rollout(3, (2, 3), has_tools=has_tools), rollout(4, (4, 1), has_tools=has_tools)]
    restored = from_arrays(to_arrays([(rollouts[0], scores), (rollouts[1], None)]), NAMES)
    assert restored[1][1] is None
    np.testing.assert_equal(restored[0][1], scores)
    for (found, _), expected in zip(restored, rollouts, strict=True):
        assert (found.number, found.step, found.seconds) == (expected.number, expected.step, expected.seconds)
        # All rows have the columns of the longest response.
        cut = expected.responses._replace(
            tokens_BR=expected.responses.tokens_BR[:, :4], log_probs_BR=expected.responses.log_probs_BR[:, :4]
        )
        if has_tools:
            cut = cut._replace(tools=cut.tools._replace(generated_BR=cut.tools.generated_BR[:, :4]))
        np.testing.assert_equal(found.responses, cut)
    assert from_arrays(to_arrays([]), NAMES) == []


def test_the_arrays_of_former_versions_can_be_read():
    """They contain one rollout, without an axis for rollouts, scores or tools."""
    arrays = {
        'numbers': np.array([3, 6, 5], np.int32),
        'seconds': np.array([0.5], np.float32),
        'tokens': np.array([[1, 2, 0], [3, 4, 5]], np.int32),
        'log_probs': np.array([[-1, -2, 0], [-3, -4, -5]], np.float32),
        'lengths': np.array([2, 3]),
        'ended': np.array([True, False]),
    }
    ((found, scores),) = from_arrays(arrays, NAMES)
    assert scores is None
    assert (found.number, found.step, found.responses.passes, found.seconds) == (3, 6, 5, 0.5)
    assert found.responses.tools is None
    for name, field in {'tokens': 0, 'log_probs': 1, 'lengths': 2, 'ended': 3}.items():
        np.testing.assert_array_equal(found.responses[field], arrays[name])


@pytest.mark.parametrize('has_tools', [False, True])
def test_the_plan_counts_the_arrays_of_tokens(has_tools):
    settings = {'train__objective': 'grpo', 'train__global_batch_size': 2, 'data__seq_len': 8}
    settings |= {f'grpo__{key}': 2 for key in ('num_generations', 'max_staleness')}
    settings |= {'grpo__prompts_per_rollout': 1, 'grpo__max_completion_length': 5}
    settings |= {'grpo__tools': ('my_tools:calculate',)} if has_tools else {}
    config = small_config(**settings)
    arrays = to_arrays([(rollout(number, (5, 5), has_tools=has_tools), None) for number in (1, 2)])
    # The sampler's tokens are int32.
    sizes = [arrays['tokens'].astype(np.int32).nbytes, arrays['log_probs'].nbytes]
    assert pending_bytes(config) == sum(sizes) + (arrays['generated'].nbytes if has_tools else 0)
    synchronous = small_config(**{**settings, 'grpo__max_staleness': 0})
    assert checkpoint_bytes(config) - checkpoint_bytes(synchronous) == pending_bytes(config) > 0
