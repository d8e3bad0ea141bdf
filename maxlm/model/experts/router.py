"""Expert routing: the router, which selects the experts of each token, and its statistics.

Shapes: B batch, T length, N tokens, D dim, E experts, k experts per token, G groups of experts, X experts of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.linear import parameter
from maxlm.parallel.partitioning import Partitioning

# Names of the router in its layer, and of the parameter that `maxlm.training.update` changes instead of the optimizer.
ROUTER, BALANCE_BIAS = 'router', 'balance_bias'
# Added to a sum of scores, which underflows if all of them are tiny (DeepSeek-V3's code).
_TINY = 1e-20


class RouterStats(NamedTuple):
    """Statistics of the router of one layer, over the tokens of a micro-batch on all devices, without padding.

    Attributes:
        load_E: number of tokens that selected each expert.
        load_balancing_loss: E · Σ f · p over the experts (Fedus et al. 2022, "Switch Transformers", eq. 4), where f is
            the fraction of the selections of an expert and p its mean probability. It is 1 for balanced loads.
        z_loss: mean of log² Σ exp(logits) (Zoph et al. 2022, "ST-MoE", eq. 5).
        entropy: mean entropy of the probabilities, in nats.
        dropped: fraction of the selections that exceeded the capacity of an expert.
    """

    load_E: jax.Array
    load_balancing_loss: jax.Array
    z_loss: jax.Array
    entropy: jax.Array
    dropped: jax.Array


class Router(nnx.Module):
    """Linear layer from the hidden state to one logit per expert, in float32."""

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        D, E = config.dim, config.num_experts
        zeros = jax.nn.initializers.zeros
        self.kernel = parameter(rngs, (D, E), ('embed', 'routes'), initializers(config).projection)
        self.bias = parameter(rngs, (E,), ('routes',), zeros) if config.router_use_bias else None
        self.balance_bias = parameter(rngs, (E,), ('routes',), zeros) if config.router_balance_bias else None
        self.partitioning = partitioning

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits [B, T, E] in float32, because rounding would change the selection of experts."""
        kernel_DE = self.partitioning.gathered(self.kernel[...].astype(jnp.float32), ('embed', 'routes'))
        logits_BTE = jnp.dot(x_BTD.astype(jnp.float32), kernel_DE, precision=jax.lax.Precision.HIGHEST)
        return logits_BTE if self.bias is None else logits_BTE + self.bias[...][None, None, :]


def select_experts(
    logits_NE: jax.Array, balance_bias_E: jax.Array | None, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token in descending order of their scores, [N, k], and their weights in float32.

    The bias that balances the loads is added to the scores for the selection only (DeepSeek-AI 2024, "DeepSeek-V3",
    eq. 16).
    """
    scores_NE = _scores(logits_NE, config)
    choice_NE = jax.lax.stop_gradient(scores_NE)
    if balance_bias_E is not None:
        choice_NE = choice_NE + jax.lax.stop_gradient(balance_bias_E)[None, :]
    if config.num_groups_per_token < config.num_expert_groups:
        choice_NE = _limit_groups(choice_NE, config)
    _, expert_Nk = jax.lax.top_k(choice_NE, config.num_experts_per_token)
    weight_Nk = jnp.take_along_axis(scores_NE, expert_Nk, axis=1)
    if config.router_normalize:
        weight_Nk = weight_Nk / (weight_Nk.sum(axis=1, keepdims=True) + _TINY)
    return expert_Nk, config.routed_scaling_factor * weight_Nk


def router_stats(
    logits_BTE: jax.Array,
    load_E: jax.Array,
    num_dropped: jax.Array,
    is_token_BT: jax.Array | None,
    config: ModelConfig,
) -> RouterStats:
    """Returns the statistics of a layer; the losses have gradients with respect to the logits.

    Args:
        logits_BTE: logits of the router.
        load_E: number of tokens that selected each expert.
        num_dropped: number of selections that exceeded a capacity.
        is_token_BT: False for padding; None: no padding.
        config: config of the model.
    """
    E, k = config.num_experts, config.num_experts_per_token
    weight_BT = jnp.ones(logits_BTE.shape[:2]) if is_token_BT is None else is_token_BT.astype(jnp.float32)
    # 1 token if the micro-batch contains only padding.
    num_tokens = jnp.maximum(weight_BT.sum(), 1)

    def mean(x_BT: jax.Array) -> jax.Array:
        return (x_BT * weight_BT).sum() / num_tokens

    scores_BTE = _scores(logits_BTE, config)
    # Sigmoid scores are normalized to probabilities (DeepSeek-V3, eq. 19). Softmax scores sum to 1.
    probs_BTE = scores_BTE / (scores_BTE.sum(axis=-1, keepdims=True) + _TINY)
    prob_E = jnp.einsum('BTE,BT->E', probs_BTE, weight_BT) / num_tokens
    share_E = jax.lax.stop_gradient(load_E.astype(jnp.float32)) / (num_tokens * k)
    entropy_BT = -(probs_BTE * jnp.log(probs_BTE + _TINY)).sum(axis=-1)
    log_z_BT = jax.nn.logsumexp(logits_BTE, axis=-1)
    return RouterStats(
        load_E=jax.lax.stop_gradient(load_E.astype(jnp.float32)),
        load_balancing_loss=E * (share_E * prob_E).sum(),
        z_loss=mean(jnp.square(log_z_BT)),
        entropy=jax.lax.stop_gradient(mean(entropy_BT)),
        dropped=jax.lax.stop_gradient(num_dropped.astype(jnp.float32)) / (num_tokens * k),
    )


def _scores(logits: jax.Array, config: ModelConfig) -> jax.Array:
    if config.router_score == 'sigmoid':
        return jax.nn.sigmoid(logits)
    assert config.router_score == 'softmax', config.router_score
    return jax.nn.softmax(logits, axis=-1)


def _limit_groups(choice_NE: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the scores with -∞ for experts outside of the token's best groups (DeepSeek-V2, §2.2.2)."""
    G = config.num_expert_groups
    choice_NGX = choice_NE.reshape(len(choice_NE), G, -1)
    if config.expert_group_score == 'top2':
        group_NG = jax.lax.top_k(choice_NGX, 2)[0].sum(axis=-1)
    else:
        assert config.expert_group_score == 'max', config.expert_group_score
        group_NG = choice_NGX.max(axis=-1)
    _, best_NM = jax.lax.top_k(group_NG, config.num_groups_per_token)
    is_best_NG = jax.nn.one_hot(best_NM, G, dtype=bool).any(axis=1)
    return jnp.where(is_best_NG[:, :, None], choice_NGX, -jnp.inf).reshape(choice_NE.shape)
