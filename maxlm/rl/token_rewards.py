"""Rewards that depend on the tokens of a response: the score of a reward model, and a punishment of its length.

Shapes: N responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.errors import InputError
from maxlm.rl.generation.responses import Responses
from maxlm.rl.reward_model import RewardModel
from maxlm.rl.rewards.rewards import MODEL_SCORE, OVERLONG, parse_reward

# Name of the reward → value of each response.
TokenRewards = Mapping[str, Sequence[float]]


def soft_overlong_punishment(lengths_N: np.ndarray, *, max_length: int, cache: int) -> np.ndarray:
    """Returns 0 up to `max_length` - `cache` tokens, then a linear decrease to -1 at `max_length`, float64 [N].

    Yu et al. 2025, "DAPO", equation 13.

    Args:
        lengths_N: number of tokens of each response, with its end token.
        max_length: largest number of tokens.
        cache: number of tokens of the decrease, above 0.

    Examples:
        >>> soft_overlong_punishment(np.array([80, 90, 100]), max_length=100, cache=20).tolist()
        [0.0, -0.5, -1.0]
    """
    punished: np.ndarray = np.clip((max_length - cache - lengths_N) / cache, -1, 0)
    return punished + 0.0


def token_rewards(
    reward: str,
    prompts: Sequence[np.ndarray],
    responses: Responses,
    *,
    grpo: GrpoConfig,
    reward_model: RewardModel | None,
) -> TokenRewards:
    """Returns the values of the `TOKEN_REWARDS` that the sum `reward` contains. All processes call it together.

    Args:
        reward: sum of rewards, see `parse_reward`.
        prompts: token ids of the prompt of each response, which a reward model reads.
        responses: N responses.
        grpo: section `grpo` of the config.
        reward_model: reward model of `grpo.reward_model`.
    """
    weights = parse_reward(reward, is_imported=False).weights
    found: dict[str, Sequence[float]] = {}
    if MODEL_SCORE in weights and reward_model is not None:
        found[MODEL_SCORE] = reward_model(prompts, responses).tolist()
    if OVERLONG in weights:
        lengths, most = responses.num_B, grpo.max_completion_length
        found[OVERLONG] = soft_overlong_punishment(lengths, max_length=most, cache=grpo.soft_punish_cache).tolist()
    return found


def check_overlong(grpo: GrpoConfig) -> None:
    """Checks that `grpo.soft_punish_cache` is set if a reward needs it, and only then.

    Raises:
        InputError: it is missing, has no effect, or exceeds the length of responses.
    """
    key, cache = f'grpo.soft_punish_cache={grpo.soft_punish_cache}', grpo.soft_punish_cache
    is_used = any(
        OVERLONG in parse_reward(text, is_imported=False).weights
        for text in (grpo.reward, grpo.eval_reward or grpo.reward)
    )
    if cache and not is_used:
        raise InputError(f'{key} has no effect with grpo.reward={grpo.reward}; add {OVERLONG} to grpo.reward')
    if is_used and not cache:
        raise InputError(
            f'{key}: the reward {OVERLONG} needs a number of tokens; set it, e.g. to a fifth of '
            f'grpo.max_completion_length={grpo.max_completion_length}'
        )
    if cache > grpo.max_completion_length:
        raise InputError(f'{key} exceeds grpo.max_completion_length={grpo.max_completion_length}; lower it')
