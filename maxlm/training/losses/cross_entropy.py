"""Next-token cross-entropy in chunks, with gradients computed in the forward pass.

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
from maxlm.training.losses.chunked_logits import LogitChunks, scan_chunks


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
) -> Losses:
    """Computes the loss, differentiable with respect to hidden states and kernel.

    Float32 logits exist for one chunk of about `chunk` tokens on each device at a time. Each device accumulates the
    kernel's gradient of its part of the batch in float32. The gradients are summed over devices once.

    Args:
        hidden_BTD: last hidden states of the model, in the compute dtype.
        kernel_DV: float32 kernel of the head, sharded as its parameter.
        targets_BT: ids of the tokens to predict.
        weights_BT: 1 at positions with a target, else 0.
        partitioning, chunk, row_groups: see `LogitChunks`.
        z_loss: weight of log² Z, which keeps Z near 1 (Chowdhery et al. 2022, "PaLM").
        logit_softcap: `model.logit_softcap` of the config.
    """
    chunks = LogitChunks(hidden_BTD, partitioning=partitioning, chunk=chunk, row_groups=row_groups)
    vocab_size = kernel_DV.shape[1]

    def losses(scores_RPNV: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        scores = without_padding(softcap(scores_RPNV, logit_softcap), vocab_size)
        # A sum over a selection, because its gradient is a selection. The gradient of an index would be a scatter.
        is_target = jax.lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1) == targets[..., None]
        log_z = jax.nn.logsumexp(scores, axis=-1)
        loss = weights * (log_z - jnp.where(is_target, scores, 0).sum(-1))
        log_z_squared = weights * jnp.square(log_z)
        return (loss + z_loss * log_z_squared if z_loss else loss).sum(), (loss, log_z_squared)

    def total(objectives: jax.Array, sums: tuple[jax.Array, jax.Array]) -> Losses:
        return Losses(objectives.sum(), *(chunks.join(x).sum(1) for x in sums))

    @jax.custom_vjp
    def run(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> Losses:
        kernel_RPDV = chunks.spread(kernel_DV)

        def add(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, Any]:
            hidden, targets, weights = inputs
            return None, losses(chunks.logits(hidden, kernel_RPDV), targets, weights)

        return total(*scan_chunks(add, None, tuple(map(chunks.split, (hidden_BTD, targets_BT, weights_BT))))[1])

    def forward(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> tuple[Losses, Any]:
        kernel_RPDV = chunks.spread(kernel_DV)

        def add(kernel_gradient: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
            hidden, targets, weights = inputs
            scores = chunks.logits(hidden, kernel_RPDV)
            objective, pull_back, sums = jax.vjp(lambda x: losses(x, targets, weights), scores, has_aux=True)
            (gradient,) = pull_back(jnp.ones((), jnp.float32))
            kernel_gradient, of_hidden = chunks.add_gradient(kernel_gradient, hidden, kernel_RPDV, gradient)
            return kernel_gradient, (objective, sums, of_hidden)

        inputs = tuple(map(chunks.split, (hidden_BTD, targets_BT, weights_BT)))
        kernel_gradient, (objectives, sums, of_hidden) = scan_chunks(add, chunks.no_gradient(kernel_RPDV), inputs)
        return total(objectives, sums), (chunks.join(of_hidden), chunks.sum_gradient(kernel_gradient, vocab_size))

    def backward(residuals: tuple[jax.Array, jax.Array], cotangent: Losses) -> tuple[jax.Array, ...]:
        # The cotangent of the objective is a scalar, the loss scale. The other outputs have no gradient.
        hidden_gradient, kernel_gradient = residuals
        return (hidden_gradient * cotangent.objective).astype(hidden_BTD.dtype), kernel_gradient * cotangent.objective

    run.defvjp(forward, backward)
    with jax.named_scope('loss'):
        found = run(hidden_BTD, kernel_DV)
    return Losses(found.objective, *map(jax.lax.stop_gradient, found[1:]))
