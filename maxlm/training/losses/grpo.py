"""Reinforcement by rewards: GRPO's advantages and loss, as pure functions.

Shao et al. 2024, "DeepSeekMath", with the corrections that Yu et al. 2025, "DAPO", and Liu et al. 2025, "Understanding
R1-Zero-Like Training", published.

Shapes: B batch, T length, N responses, G responses of a group (to the same prompt).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema_rl import GrpoConfig

# Added to a group's deviation before the division.
EPSILON = 1e-6


class PolicySums(NamedTuple):
    """Sums over a batch, float32 scalars; only `objective` has a gradient."""

    # Σ weight · (what is minimized of each token).
    objective: jax.Array
    # Over predicted tokens, whatever their weight: how many, and of each: clipped or not, the entropy of the softmax,
    # the divergence from the policy that drew it, and from the reference.
    tokens: jax.Array
    clipped: jax.Array
    entropy: jax.Array
    old_kl: jax.Array
    reference_kl: jax.Array


def advantages(rewards_N: np.ndarray, config: GrpoConfig) -> np.ndarray:
    """How much better each response is than its group, float32 [N]; 0 where all of a group have the same reward.

    Args:
        rewards_N: of the responses, those of a group one after the other.
        config: with `samples` G.
    """
    groups = np.asarray(rewards_N, np.float64).reshape(-1, config.num_generations)
    centred = groups - groups.mean(axis=1, keepdims=True)
    agree = np.ptp(groups, axis=1, keepdims=True) == 0
    if config.scale_rewards:
        # Of the group as a sample: divided by G - 1, as is usual.
        centred /= groups.std(axis=1, ddof=1, keepdims=True) + EPSILON
    return np.where(agree, 0.0, centred).astype(np.float32).reshape(-1)


def token_weights(predicted_BT: np.ndarray, active_B: np.ndarray, config: GrpoConfig) -> np.ndarray:
    """What each token counts in the loss, float32 [B, T]; the loss is the sum divided by that of all weights.

    Args:
        predicted_BT: 1 at tokens of responses, each row's being one response; else 0.
        active_B: 1 where the group has responses of different rewards; the others are left out.
        config: with `loss_type`.
    """
    weights_BT = predicted_BT * active_B[:, None]
    if config.loss_type == 'grpo':
        weights_BT = weights_BT / np.maximum(predicted_BT.sum(axis=1, keepdims=True), 1)
    return weights_BT.astype(np.float32)


def policy_sums(
    log_probs_BT: jax.Array,
    entropies_BT: jax.Array,
    reference_BT: jax.Array | None,
    *,
    old_log_probs_BT: jax.Array,
    advantages_BT: jax.Array,
    predicted_BT: jax.Array,
    weights_BT: jax.Array,
    config: GrpoConfig,
) -> PolicySums:
    """Of each token -min(r · A, clip(r, 1 - epsilon, 1 + epsilon_high) · A) + kl_coef · KL, summed up.

    r is the probability of the token divided by that with which it was drawn. KL is the estimate of Schulman 2020,
    "Approximating KL Divergence", k3: q/p - log(q/p) - 1 with the reference's probability q.

    Args:
        log_probs_BT: of the tokens, by the policy that learns.
        entropies_BT: of its softmax.
        reference_BT: log-probabilities by the reference; None = none.
        old_log_probs_BT: by the policy that drew them.
        advantages_BT: of the response that a token belongs to.
        predicted_BT: 1 at tokens of responses, else 0.
        weights_BT: of the tokens in the loss.
        config: with the bounds of r, and the weight of KL.
    """
    # A selection first: where nothing is predicted there may be anything.
    is_predicted = predicted_BT > 0
    log_ratio_BT = jnp.where(is_predicted, log_probs_BT - old_log_probs_BT, 0)
    ratio_BT = jnp.exp(log_ratio_BT)
    bounded_BT = jnp.clip(ratio_BT, 1 - config.epsilon, 1 + config.epsilon_high)
    gain_BT = jnp.minimum(ratio_BT * advantages_BT, bounded_BT * advantages_BT)
    loss_BT = -gain_BT
    reference_kl_BT = jnp.zeros_like(loss_BT)
    if reference_BT is not None:
        reference_kl_BT = _k3(jnp.where(is_predicted, reference_BT - log_probs_BT, 0))
        loss_BT = loss_BT + config.kl_coef * reference_kl_BT

    def total(x_BT: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(jnp.where(is_predicted, x_BT, 0).sum())

    return PolicySums(
        objective=(weights_BT * loss_BT).sum(),
        tokens=total(predicted_BT),
        clipped=total((bounded_BT * advantages_BT < ratio_BT * advantages_BT).astype(jnp.float32)),
        entropy=total(entropies_BT),
        old_kl=total(_k3(-log_ratio_BT)),
        reference_kl=total(reference_kl_BT),
    )


def _k3(log_ratio: jax.Array) -> jax.Array:
    return jnp.expm1(log_ratio) - log_ratio
