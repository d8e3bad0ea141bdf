"""Next-token cross-entropy and z-loss in chunks, with gradients computed in the forward pass.

The loss is a sum, so the gradients of a chunk are known as soon as its logits are. The logits of each chunk are
computed once, used for the loss and its gradients, and freed (Hsu et al. 2024, "Liger Kernel"). The backward pass
recomputes nothing.

Shapes: B batch, T length, D dim, V vocabulary, and those of `LogitChunks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.decoder import without_padding
from maxlm.model.layers.softcap import softcap
from maxlm.parallel.partitioning import Partitioning
from maxlm.training.losses.chunked_logits import LogitChunks, sum_over_chunks
from maxlm.training.losses.fp8_logits import Fp8LogitChunks
from maxlm.training.losses.online_softmax import online_softmax


class Losses(NamedTuple):
    """Sums over a batch, float32. Only `objective` has a gradient.

    Z is the denominator of the softmax, Σ exp(logits).

    Attributes:
        objective: Σ weight · (-log softmax(logits)[target] + z_loss · log² Z) in nats, scalar.
        loss_B: Σ weight · -log softmax(logits)[target] of each row.
        log_z_squared_B: Σ weight · log² Z of each row.
    """

    objective: jax.Array
    loss_B: jax.Array
    log_z_squared_B: jax.Array


def cross_entropy(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    partitioning: Partitioning,
    chunk: int,
    z_loss: float = 0.0,
    logit_softcap: float = 0.0,
    row_groups: int = 1,
    is_tied: bool = False,
    is_fp8: bool = False,
) -> Losses:
    """Computes the loss, differentiable with respect to hidden states and kernel.

    Float32 logits exist for one chunk of about `chunk` tokens on each device at a time. Each device accumulates the
    kernel's gradient of its part of the batch in float32. The gradients are summed over devices once.

    Args:
        hidden_BTD: last hidden states of the model, in the compute dtype.
        kernel_DV: float32 kernel of the head, sharded as its parameter.
        targets_BT: ids of the tokens to predict.
        weights_BT: 1 at positions with a target, else 0.
        partitioning, chunk, row_groups, is_tied: see `LogitChunks`.
        z_loss: weight of log² Z, which keeps Z near 1 (Chowdhery et al. 2022, "PaLM").
        logit_softcap: `model.logit_softcap` of the config.
        is_fp8: products of hidden states, kernel and gradients of logits use FP8; see `Fp8LogitChunks`.
    """
    make_chunks = Fp8LogitChunks if is_fp8 else LogitChunks
    chunks = make_chunks(hidden_BTD, partitioning=partitioning, chunk=chunk, row_groups=row_groups, is_tied=is_tied)
    vocab_size = kernel_DV.shape[1]

    def losses(scores_RPNV: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        scores = without_padding(softcap(scores_RPNV, logit_softcap), vocab_size)
        loss, log_z_squared = token_sums(scores, targets, weights, is_online=partitioning.platform == 'gpu')
        return (loss + z_loss * log_z_squared if z_loss else loss).sum(), (loss, log_z_squared)

    objective, sums = sum_over_chunks(losses, hidden_BTD, kernel_DV, (targets_BT, weights_BT), chunks)
    return Losses(objective, *sums)


def token_sums(
    scores: jax.Array, targets: jax.Array, weights: jax.Array, *, is_online: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns weight · -log softmax(logits)[target] and weight · log² Z of each position, from logits [..., V].

    With `is_online`, the logits are read once instead of twice; see `online_softmax`.

    Examples:
        The loss of equal logits is log V. A position of weight 0 has no loss:

        >>> loss, _ = token_sums(jnp.zeros((2, 8)), jnp.array([3, 5]), jnp.array([1.0, 0.0]))
        >>> loss.round(3)
        Array([2.079, 0.   ], dtype=float32)
    """
    if is_online:
        log_z, logit = online_softmax(scores, targets)
    else:
        # A sum over a selection, because its gradient is a selection. The gradient of an index would be a scatter.
        is_target = jax.lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1) == targets[..., None]
        log_z, logit = jax.nn.logsumexp(scores, axis=-1), jnp.where(is_target, scores, 0).sum(-1)
    loss = weights * (log_z - logit)
    return loss, weights * jnp.square(log_z)
