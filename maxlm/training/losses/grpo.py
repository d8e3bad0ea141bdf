"""Losses of sampled responses, as pure functions: those of GRPO and its variants, and of PPO's value head.

Shao et al. 2024, "DeepSeekMath", with the corrections of Yu et al. 2025, "DAPO", Liu et al. 2025, "Understanding
R1-Zero-Like Training", and Zheng et al. 2025, "Group Sequence Policy Optimization"; MiniMax 2025, "MiniMax-M1";
Schulman et al. 2017, "Proximal Policy Optimization Algorithms". For asynchronous rollouts, Fu et al. 2025, "AReaL", and
Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

Shapes: B batch, T length.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.sections.posttraining import GrpoConfig


class PolicySums(NamedTuple):
    """Sums over a batch, float32 scalars. Only `objective` has a gradient.

    The sums other than `objective` run over all predicted tokens, regardless of their weights.

    Attributes:
        objective: Σ weight · loss of the token.
        tokens: number of predicted tokens.
        clipped: number of tokens whose probability ratio is clipped.
        entropy: Σ entropy of the softmax.
        old_kl: Σ estimated KL divergence of the policy that sampled the token from the trained one, by k3.
        reference_kl: Σ estimated KL divergence from the reference.
        importance: Σ importance weight.
        truncated: number of tokens whose importance weight is truncated.
        value_loss: Σ loss of the value head.
        value_clipped: number of tokens whose value is clipped.
        largest_difference: largest absolute difference of the log-probability of a token from that at sampling time,
            which is no sum.
    """

    objective: jax.Array
    tokens: jax.Array
    clipped: jax.Array
    entropy: jax.Array
    old_kl: jax.Array
    reference_kl: jax.Array
    importance: jax.Array
    truncated: jax.Array
    value_loss: jax.Array
    value_clipped: jax.Array
    largest_difference: jax.Array


class Values(NamedTuple):
    """Arrays [B, T] of the value head, float32.

    Attributes:
        values_BT: values by the trained model.
        old_values_BT: values before the first update by the responses.
        returns_BT: targets of the values.
    """

    values_BT: jax.Array
    old_values_BT: jax.Array
    returns_BT: jax.Array


def token_weights(predicted_BT: np.ndarray, active_B: np.ndarray, config: GrpoConfig) -> np.ndarray:
    """Returns the weight of each token in the loss, float32 [B, T].

    The summed loss is divided by the sum of the weights, or with `loss_type` dr_grpo by the number of active responses
    times `max_completion_length`.

    Args:
        predicted_BT: 1 at tokens of responses, else 0. Each row contains one response.
        active_B: 1 if the rewards of the response's group differ, else 0. Responses of other groups have weight 0.
        config: section `grpo` of the config; `loss_type` is used.

    Examples:
        With `grpo`, each response has the same weight, and with `dapo` each token:

        >>> predicted_BT = np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
        >>> for loss_type in ('grpo', 'dapo'):
        ...     print(token_weights(predicted_BT, np.ones(2), GrpoConfig(loss_type=loss_type))[:, 3])
        [0.25 0.5 ]
        [1. 1.]
    """
    weights_BT: np.ndarray = predicted_BT * active_B[:, None]
    if config.loss_type in ('grpo', 'gspo'):
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
    proximal_BT: jax.Array | None = None,
    values: Values | None = None,
) -> PolicySums:
    """Sums -w · min(r · A, clip(r, 1 - epsilon, 1 + epsilon_high) · A) + kl_coef · KL - entropy_coef · H over tokens.

    r is the probability of a token under the trained policy, divided by its probability when it was sampled, and w is
    1. With `loss_type` gspo, r is the geometric mean of these quotients over the tokens of the response, the same for
    all of its tokens. With cispo, the first term is -w · min(r, epsilon_high) · A · log p, and only log p has a
    gradient (MiniMax 2025). KL is `kl_divergence` from the reference, and H the entropy of the softmax.

    With `values`, the sum contains the loss of the value head, as in OpenAI Baselines (Dhariwal et al. 2017):

        vf_coef / 2 · max((v - R)², (clip(v, v' - c, v' + c) - R)²)

    Here v is the value, v' the old value, R the return and c = cliprange_value.

    With `max_staleness` above 0, the policy that sampled the tokens is older than the proximal policy, which is the
    policy before the first update by these responses. This is the decoupled objective of Fu et al. 2025: r is relative
    to the proximal policy, and w = min(p/b, importance_sampling_cap) without gradient, with the probabilities p by the
    proximal policy and b at sampling time. The truncation is that of Yao et al. 2025. With gspo, p/b is also the
    geometric mean over the tokens of the response.

    Args:
        log_probs_BT: log-probabilities of the tokens by the trained policy.
        entropies_BT: entropies of its softmax.
        reference_BT: log-probabilities by the reference; None if the loss has no KL divergence.
        old_log_probs_BT: log-probabilities by the policy that sampled the tokens.
        advantages_BT: advantages of the tokens.
        predicted_BT: 1 at tokens of responses, else 0.
        weights_BT: weights of the tokens in the loss.
        config: section `grpo` of the config.
        proximal_BT: with `max_staleness` above 0, log-probabilities by the proximal policy. None in the first step
            after a rollout, in which the trained policy is the proximal policy.
        values: outputs and targets of the value head; None without one.
    """
    # Select before multiplying: positions without a target may contain non-finite values.
    is_predicted = predicted_BT > 0

    def ratio(log_ratio_BT: jax.Array) -> jax.Array:
        if config.loss_type != 'gspo':
            return jnp.exp(log_ratio_BT)
        lengths_B1 = jnp.maximum(is_predicted.sum(axis=1, keepdims=True), 1)
        mean_B1 = log_ratio_BT.sum(axis=1, keepdims=True) / lengths_B1
        return jnp.broadcast_to(jnp.exp(mean_B1), log_ratio_BT.shape)

    old_log_ratio_BT = jnp.where(is_predicted, log_probs_BT - old_log_probs_BT, 0)
    log_ratio_BT = old_log_ratio_BT
    importance_BT = jnp.ones_like(log_ratio_BT)
    truncated_BT = jnp.zeros_like(log_ratio_BT)
    if config.max_staleness:
        if proximal_BT is None:
            proximal_BT = jax.lax.stop_gradient(log_probs_BT)
        log_ratio_BT = jnp.where(is_predicted, log_probs_BT - proximal_BT, 0)
        full_BT = ratio(jnp.where(is_predicted, proximal_BT - old_log_probs_BT, 0))
        importance_BT = jnp.minimum(full_BT, config.importance_sampling_cap)
        truncated_BT = (full_BT > config.importance_sampling_cap).astype(jnp.float32)
    ratio_BT = ratio(log_ratio_BT)
    if config.loss_type == 'cispo':
        bounded_BT = jax.lax.stop_gradient(jnp.minimum(ratio_BT, config.epsilon_high))
        gain_BT = bounded_BT * advantages_BT * jnp.where(is_predicted, log_probs_BT, 0)
        is_clipped_BT = ratio_BT > config.epsilon_high
    else:
        bounded_BT = jnp.clip(ratio_BT, 1 - config.epsilon, 1 + config.epsilon_high)
        gain_BT = jnp.minimum(ratio_BT * advantages_BT, bounded_BT * advantages_BT)
        is_clipped_BT = bounded_BT * advantages_BT < ratio_BT * advantages_BT
    loss_BT = -importance_BT * gain_BT if config.max_staleness else -gain_BT
    reference_kl_BT = value_loss_BT = value_clipped_BT = jnp.zeros_like(loss_BT)
    if reference_BT is not None:
        reference_kl_BT = kl_divergence(jnp.where(is_predicted, log_probs_BT - reference_BT, 0), config.kl_estimator)
        loss_BT = loss_BT + config.kl_coef * reference_kl_BT
    if config.entropy_coef:
        loss_BT = loss_BT - config.entropy_coef * jnp.where(is_predicted, entropies_BT, 0)
    if values is not None:
        value_loss_BT, value_clipped_BT = _value_loss(values, is_predicted, config.cliprange_value)
        loss_BT = loss_BT + config.vf_coef * value_loss_BT

    def total(x_BT: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(jnp.where(is_predicted, x_BT, 0).sum())

    return PolicySums(
        objective=(weights_BT * loss_BT).sum(),
        tokens=total(predicted_BT),
        clipped=total(is_clipped_BT.astype(jnp.float32)),
        entropy=total(entropies_BT),
        # The other policy sampled the tokens.
        old_kl=total(kl_divergence(-old_log_ratio_BT, 'k3')),
        reference_kl=total(reference_kl_BT),
        importance=total(importance_BT),
        truncated=total(truncated_BT),
        value_loss=total(value_loss_BT),
        value_clipped=total(value_clipped_BT),
        largest_difference=jax.lax.stop_gradient(jnp.abs(old_log_ratio_BT).max()),
    )


def _value_loss(values: Values, is_predicted_BT: jax.Array, cliprange: float) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each value, and 1 where the clipped value determines it; see `policy_sums`."""
    values_BT, old_BT, returns_BT = (jnp.where(is_predicted_BT, x_BT, 0) for x_BT in values)
    bounded_BT = jnp.clip(values_BT, old_BT - cliprange, old_BT + cliprange)
    free_BT, clipped_BT = jnp.square(values_BT - returns_BT), jnp.square(bounded_BT - returns_BT)
    return jnp.maximum(free_BT, clipped_BT) / 2, (clipped_BT > free_BT).astype(jnp.float32)


def kl_divergence(log_ratio: jax.Array, estimator: str) -> jax.Array:
    """Estimates the KL divergence of p from q by the tokens that p sampled.

    With r = q/p, k1 is -log r, k2 is log²(r) / 2 and k3 is r - 1 - log r (Schulman 2020, "Approximating KL
    Divergence").

    Args:
        log_ratio: log(p/q) of tokens.
        estimator: k1, k2 or k3.

    Examples:
        >>> [round(float(kl_divergence(jnp.log(0.5 / 0.25), name)), 4) for name in ('k1', 'k2', 'k3')]
        [0.6931, 0.2402, 0.1931]
    """
    if estimator == 'k1':
        return log_ratio
    return jnp.square(log_ratio) / 2 if estimator == 'k2' else jnp.expm1(-log_ratio) + log_ratio
