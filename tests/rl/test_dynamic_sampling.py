"""Replacement of groups with equal rewards."""

import dataclasses

import numpy as np
import pytest

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.rl.dynamic_sampling import ScoredRollout, differ, fill_groups
from maxlm.rl.generation.responses import EnvironmentUse, Responses, ToolUse
from maxlm.rl.rewards.scorer import Scores

GRPO = GrpoConfig(num_generations=2, max_num_gen_batches=4)


def rollout(attempt, rewards, *, has_tools=False):
    """Returns a rollout whose tokens and prompts are 100 · attempt + the number of the row or prompt."""
    rewards = np.array(rewards, np.float32)
    rows = np.arange(len(rewards)) + 100 * attempt
    tokens = np.repeat(rows[:, None], 3, axis=1).astype(np.int32)
    tools = ToolUse(tokens % 2 == 0, rows, rows + 1) if has_tools else None
    responses = Responses(tokens, tokens.astype(np.float32), rows % 3, rows % 2 == 0, 5, tools)
    prompts = [int(row // 2 * 2) for row in rows]
    return ScoredRollout(prompts, responses, Scores(rewards, {'exact': rewards}, np.zeros_like(rewards)))


def fill(rewards, grpo=GRPO, **options):
    """Fills the first of the rollouts with these rewards from the others, and returns also the used attempts."""
    attempts = []

    def draw(attempt):
        attempts.append(attempt)
        return rollout(attempt, rewards[attempt], **options)

    found, metrics = fill_groups(rollout(0, rewards[0], **options), draw, grpo)
    return found, metrics, attempts


@pytest.mark.parametrize('has_tools', [False, True])
def test_groups_with_equal_rewards_are_replaced_in_order(has_tools):
    found, metrics, attempts = fill([[1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1], [1, 0, 0, 1, 0, 1]], has_tools=has_tools)
    assert attempts == [1, 2]
    # The second group stays; the first group of each attempt with different rewards takes the first free place.
    assert found.prompts == [102, 102, 2, 2, 200, 200]
    rows = np.array([102, 103, 2, 3, 200, 201])
    np.testing.assert_array_equal(found.responses.tokens_BR, np.repeat(rows[:, None], 3, axis=1))
    np.testing.assert_array_equal(found.responses.num_B, rows % 3)
    np.testing.assert_array_equal(found.responses.ended_B, rows % 2 == 0)
    np.testing.assert_array_equal(found.scores.rewards, [1, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(found.scores.components['exact'], found.scores.rewards)
    assert found.responses.passes == 15
    assert metrics == {'rollout/num_gen_batches': 3, 'rollout/unfilled_groups': 0}
    if has_tools:
        np.testing.assert_array_equal(found.responses.tools.num_errors_B, rows + 1)


def test_a_full_rollout_draws_nothing():
    found, metrics, attempts = fill([[1, 0, 0, 1]])
    assert attempts == []
    assert metrics == {'rollout/num_gen_batches': 1, 'rollout/unfilled_groups': 0}
    assert found.prompts == [0, 0, 2, 2]


def test_the_number_of_attempts_is_limited():
    found, metrics, attempts = fill([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    assert attempts == [1, 2, 3]
    assert metrics == {'rollout/num_gen_batches': 4, 'rollout/unfilled_groups': 0.5}
    assert found.prompts == [0, 0, 2, 2]
    assert differ(found.scores, 2).tolist() == [False, True]


def test_one_attempt_changes_nothing():
    found, metrics, attempts = fill([[1, 1, 0, 0]], dataclasses.replace(GRPO, max_num_gen_batches=1))
    assert (metrics, attempts) == ({}, [])
    assert not differ(found.scores, 2).any()


def test_failed_conversations_do_not_count():
    scores = Scores(np.array([1, 0, 1, 1, 1, 0, 0, 0], np.float32), {}, np.zeros(8))
    assert differ(scores, 4).tolist() == [True, True]
    excluded = np.array([0, 1, 0, 0, 1, 0, 1, 1], np.float32)
    # The used rewards of the first group are equal, and the second group has a single one.
    assert differ(scores._replace(excluded=excluded), 4).tolist() == [False, False]
    assert differ(scores._replace(excluded=np.ones(8)), 4).tolist() == [False, False]


def test_conversations_keep_their_prompts_and_scores():
    def conversations(attempt, rewards, name):
        found = rollout(attempt, rewards, has_tools=True)
        rows = found.responses.tokens_BR[:, 0]
        scores = Scores(found.scores.rewards, {name: rows.astype(np.float32)}, np.zeros(4), rows % 2)
        prompts = tuple(np.full(row // 2 + 1, row, np.uint32) for row in rows)
        use = EnvironmentUse(prompts, np.zeros(len(prompts), bool), scores)
        return ScoredRollout(found.prompts, found.responses._replace(environment=use), scores)

    first, second = conversations(0, [1, 1, 0, 1], 'near'), conversations(1, [0, 1, 1, 1], 'far')
    first, second = (each._replace(scores=each.scores._replace(excluded=np.zeros(4))) for each in (first, second))
    found, _ = fill_groups(first, lambda _: second, GRPO)
    rows = [100, 101, 2, 3]
    assert [prompt.tolist() for prompt in found.responses.environment.prompts] == [
        [row] * (row // 2 + 1) for row in rows
    ]
    np.testing.assert_array_equal(found.scores.components['near'], [np.nan, np.nan, 2, 3])
    np.testing.assert_array_equal(found.scores.components['far'], [100, 101, np.nan, np.nan])
    assert found.responses.environment.scores is found.scores
