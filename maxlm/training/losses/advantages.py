"""Advantages of sampled responses, as pure functions of arrays in host memory.

Shapes: N responses, G responses per group (to the same prompt), T length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxlm.config.sections.posttraining import GrpoConfig

# Added to the standard deviation of a group before the division.
EPSILON = 1e-6
# Added to the variance of the advantages of tokens, as in PPO of TRL.
VARIANCE_EPSILON = 1e-8


def advantages(rewards_N: np.ndarray, config: GrpoConfig) -> np.ndarray:
    """Returns the advantage of each response over its group, float32 [N]; 0 if all rewards of a group are equal.

    With `advantage_estimator` grpo, it is the distance from the mean reward of the group, with `scale_rewards` divided
    by the sample standard deviation. With rloo, it is the distance from the mean reward of the other responses of the
    group (Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization").

    Args:
        rewards_N: rewards of the responses; the responses of a group are consecutive.
        config: section `grpo` of the config; `num_generations` is G.

    Examples:
        Two groups of two responses. All responses of the second group are wrong, so they have no advantage:

        >>> advantages(np.array([1.0, 0.0, 0.0, 0.0]), GrpoConfig(num_generations=2, scale_rewards=False)).tolist()
        [0.5, -0.5, 0.0, 0.0]
        >>> advantages(np.array([1.0, 0.0]), GrpoConfig(num_generations=2, advantage_estimator='rloo')).tolist()
        [1.0, -1.0]
    """
    groups = np.asarray(rewards_N, np.float64).reshape(-1, config.num_generations)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if config.advantage_estimator == 'rloo':
        # The distance from the mean of all responses contains the response itself with the weight 1/G.
        centred *= config.num_generations / (config.num_generations - 1)
    elif config.scale_rewards:
        # The sample standard deviation, with divisor G - 1.
        centred /= groups.std(axis=1, ddof=1, keepdims=True) + EPSILON
    agree = np.ptp(groups, axis=1, keepdims=True) == 0
    return np.where(agree, 0.0, centred).astype(np.float32).reshape(-1)


class TokenAdvantages(NamedTuple):
    """Advantages of tokens and targets of their values, float32 [N, T]; 0 at tokens that are not predicted."""

    advantages: np.ndarray
    returns: np.ndarray


def generalized_advantages(
    rewards_NT: np.ndarray, values_NT: np.ndarray, predicted_NT: np.ndarray, config: GrpoConfig
) -> TokenAdvantages:
    """Returns the advantages of tokens by their values (Schulman et al. 2015, equation 16), and advantage + value.

        A_t = Σ_l (gamma · lam)^l · δ_(t+l)    with    δ_t = r_t + gamma · V_(t+1) - V_t

    The sum runs over the predicted tokens of the row, and the value after the last one is 0. Tokens between them, such
    as results of tools, take no time.

    Args:
        rewards_NT: reward of each token.
        values_NT: value before each token.
        predicted_NT: 1 at tokens of the model, else 0.
        config: section `grpo` of the config; `gamma` and `lam` are used.
    """
    gamma, lam = config.gamma, config.lam
    found_NT = np.zeros(values_NT.shape)
    after_N, next_value_N = np.zeros(len(values_NT)), np.zeros(len(values_NT))
    for t in reversed(range(values_NT.shape[1])):
        is_predicted_N = predicted_NT[:, t] > 0
        delta_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        after_N = np.where(is_predicted_N, delta_N + gamma * lam * after_N, after_N)
        next_value_N = np.where(is_predicted_N, values_NT[:, t], next_value_N)
        found_NT[:, t] = np.where(is_predicted_N, after_N, 0)
    returns_NT = np.where(predicted_NT > 0, found_NT + values_NT, 0)
    return TokenAdvantages(found_NT.astype(np.float32), returns_NT.astype(np.float32))


def whitened(advantages_NT: np.ndarray, predicted_NT: np.ndarray) -> np.ndarray:
    """Returns the advantages of predicted tokens with mean 0 and sample variance 1, float32 [N, T]; 0 elsewhere."""
    chosen = advantages_NT[predicted_NT > 0].astype(np.float64)
    if len(chosen) < 2:
        return np.zeros_like(advantages_NT, np.float32)
    scale = 1 / np.sqrt(chosen.var(ddof=1) + VARIANCE_EPSILON)
    return np.where(predicted_NT > 0, (advantages_NT - chosen.mean()) * scale, 0).astype(np.float32)
