"""Rewards of the length of a response against TRL, and their keys."""

import dataclasses

import numpy as np
import pytest
from trl.rewards import get_soft_overlong_punishment

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.errors import InputError
from maxlm.rl.generation.responses import Responses
from maxlm.rl.rewards.scorer import RewardScorer
from maxlm.rl.token_rewards import check_overlong, soft_overlong_punishment, token_rewards

GRPO = GrpoConfig(max_completion_length=10, soft_punish_cache=4, reward='numeric + 0.5*soft_overlong_punishment')


@pytest.mark.parametrize('cache', [1, 4, 10])
def test_punishment_equals_that_of_trl(cache):
    lengths = np.arange(1, 11)
    expected = get_soft_overlong_punishment(10, cache)([[0] * length for length in lengths])
    found = soft_overlong_punishment(lengths, max_length=10, cache=cache)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (found[0], found[-1]) == ((0, -1) if cache < 10 else (-0.1, -1))


def test_punishment_is_a_term_of_the_reward():
    tokens = np.zeros((3, 10), np.int32)
    lengths = np.array([6, 8, 10], np.int32)
    responses = Responses(tokens, tokens.astype(np.float32), lengths, np.ones(3, bool), 0)
    found = token_rewards(GRPO.reward, (), responses, grpo=GRPO, reward_model=None)
    with RewardScorer(GRPO.reward) as scorer:
        # The texts are equal, the numbers of tokens are not.
        scores = scorer.score(['7'] * 3, [{'answer': 7}] * 3, by_tokens=found)
    np.testing.assert_allclose(scores.rewards, [1, 0.75, 0.5])
    np.testing.assert_allclose(scores.components['soft_overlong_punishment'], [0, -0.5, -1])
    assert token_rewards('numeric', (), responses, grpo=GRPO, reward_model=None) == {}


@pytest.mark.parametrize(
    ('changes', 'parts'),
    [
        ({'soft_punish_cache': 0}, ['grpo.soft_punish_cache=0', 'grpo.max_completion_length=10']),
        ({'reward': 'numeric'}, ['grpo.soft_punish_cache=4', 'no effect', 'grpo.reward=numeric']),
        ({'soft_punish_cache': 11}, ['grpo.soft_punish_cache=11', 'exceeds grpo.max_completion_length=10']),
    ],
)
def test_keys_without_effect_are_refused(changes, parts):
    check_overlong(GRPO)
    with pytest.raises(InputError) as error:
        check_overlong(dataclasses.replace(GRPO, **changes))
    assert all(part in str(error.value) for part in parts)


def test_evaluations_may_use_the_punishment():
    check_overlong(dataclasses.replace(GRPO, reward='numeric', eval_reward='soft_overlong_punishment'))
