"""Next-token cross-entropy and log Z of the softmax over chunks of the batch, with gradients made on the way forward.

The gradient of a sum is known as soon as its terms are, so each chunk's logits are made once, used for the loss and for
the gradients, and dropped (the idea of Hsu et al. 2024, "Liger Kernel"). Nothing is computed a second time.

Shapes: B batch, T length, C positions of a chunk, D dim, V vocabulary. R and P: devices that rows and length are split
over; X chunks; N = positions of a chunk on one device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.decoder import soft_capped
from maxlm.model.placement import Placement

# Names of a chunk's leading axes for the placement: [X, R, P, …] and [R, P, …].
_PARTS = ('rows', 'length')


class Losses(NamedTuple):
    """Sums over a batch, float32; only `objective` has a gradient."""

    # [] Σ weight · (-log softmax(logits)[target] + z_loss · log² Z), in nats.
    objective: jax.Array
    # [B] of each row, Σ weight · -log softmax(logits)[target].
    loss_B: jax.Array
    # [B] of each row, Σ weight · log² Z. Z is the softmax's denominator Σ exp(logits).
    log_z_squared_B: jax.Array


def cross_entropy(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    placement: Placement,
    chunk: int,
    z_loss: float = 0.0,
    logit_softcap: float = 0.0,
    row_groups: int = 1,
) -> Losses:
    """The loss of hidden states, and its gradients by hidden states and kernel.

    Logits, in float32, exist for one chunk at a time: `chunk` positions of each row of a group on each device.
    Gradients of logits are rounded to the type of the hidden states, in which both products with them are done. The
    kernel's gradient is added up in float32 by each device for its own part of the batch, and over devices once.

    Args:
        hidden_BTD: the model's last hidden states, in the type of the computation.
        kernel_DV: of the head, in float32, as its parameter lies.
        targets_BT: ids of the tokens to predict.
        weights_BT: 1 where there is one, else 0.
        placement: of the model.
        chunk: positions of each row whose logits exist at the same time.
        z_loss: weight of log² Z, which keeps Z near 1 (Chowdhery et al. 2022, "PaLM").
        logit_softcap: of the model.
        row_groups: groups that the rows are taken in. Row r is in group r mod row_groups, so that no row changes its
            device.
    """
    B, T, _ = hidden_BTD.shape
    R, P = (placement.parts(axis) for axis in _PARTS)
    C = min(chunk, T // P)
    chunks = -(-T // (P * C))
    shape = (R, B // (R * row_groups), row_groups, P, chunks, C)

    def split(x: jax.Array) -> jax.Array:
        """[B, T, …] → [X, R, P, N, …]. Positions that fill the last chunk have weight 0."""
        rest = x.shape[2:]
        x = x.reshape(B, P, T // P, *rest)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * C - T // P)] + [(0, 0)] * len(rest))
        x = jnp.moveaxis(x.reshape(*shape, *rest), (2, 4, 0, 3, 1, 5), range(6))
        x = x.reshape(row_groups * chunks, R, P, -1, *rest)
        return placement.constrain(x, ('micro_batch', *_PARTS, *['activation'] * (x.ndim - 3)))

    def join(x: jax.Array) -> jax.Array:
        """The way back."""
        rest = x.shape[4:]
        x = x.reshape(row_groups, chunks, R, P, shape[1], C, *rest)
        x = jnp.moveaxis(x, range(6), (2, 4, 0, 3, 1, 5)).reshape(B, P, chunks * C, *rest)
        return x[:, :, : T // P].reshape(B, T, *rest)

    def spread(kernel_DV: jax.Array) -> jax.Array:
        """The kernel on every device, whole but for the vocabulary: [R, P, D, V] in the type of the computation."""
        whole = placement.constrain(kernel_DV.astype(hidden_BTD.dtype), ('activation', 'vocab'))
        whole = jnp.broadcast_to(whole, (R, P, *whole.shape))
        return placement.constrain(whole, (*_PARTS, 'activation', 'vocab'))

    def logits(hidden_RPND: jax.Array, kernel_RPDV: jax.Array) -> jax.Array:
        scores = jnp.einsum('RPND,RPDV->RPNV', hidden_RPND, kernel_RPDV, preferred_element_type=jnp.float32)
        return placement.constrain(scores, (*_PARTS, 'activation', 'vocab'))

    def losses(scores_RPNV: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        scores = soft_capped(scores_RPNV, logit_softcap)
        # A sum over a selection: its gradient is a selection too, where that of an index would be a scatter.
        is_target = jnp.arange(scores.shape[-1]) == targets[..., None]
        log_z = jax.nn.logsumexp(scores, axis=-1)
        loss = weights * (log_z - jnp.where(is_target, scores, 0).sum(-1))
        log_z_squared = weights * jnp.square(log_z)
        return (loss + z_loss * log_z_squared if z_loss else loss).sum(), (loss, log_z_squared)

    def total(objectives: jax.Array, sums: tuple[jax.Array, jax.Array]) -> Losses:
        return Losses(objectives.sum(), *(join(x).sum(1) for x in sums))

    @jax.custom_vjp
    def run(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> Losses:
        kernel_RPDV = spread(kernel_DV)

        def add(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, Any]:
            hidden, targets, weights = inputs
            return None, losses(logits(hidden, kernel_RPDV), targets, weights)

        return total(*_loop(add, None, (split(hidden_BTD), split(targets_BT), split(weights_BT)))[1])

    def forward(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> tuple[Losses, Any]:
        kernel_RPDV = spread(kernel_DV)

        def add(kernel_gradient: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
            hidden, targets, weights = inputs
            scores = logits(hidden, kernel_RPDV)
            objective, pull_back, sums = jax.vjp(lambda x: losses(x, targets, weights), scores, has_aux=True)
            (gradient,) = pull_back(jnp.ones((), jnp.float32))
            gradient = gradient.astype(hidden.dtype)
            of_hidden = jnp.einsum('RPNV,RPDV->RPND', gradient, kernel_RPDV)
            of_hidden = placement.constrain(of_hidden, (*_PARTS, 'activation', 'activation'))
            kernel_gradient += jnp.einsum('RPND,RPNV->RPDV', hidden, gradient, preferred_element_type=jnp.float32)
            return placement.constrain(kernel_gradient, (*_PARTS, 'activation', 'vocab')), (objective, sums, of_hidden)

        zeros = jnp.zeros(kernel_RPDV.shape, jnp.float32)
        inputs = split(hidden_BTD), split(targets_BT), split(weights_BT)
        kernel_gradient, (objectives, sums, of_hidden) = _loop(add, zeros, inputs)
        kernel_gradient = placement.constrain_gradient(kernel_gradient.sum((0, 1)), ('embed', 'vocab'))
        return total(objectives, sums), (join(of_hidden), kernel_gradient)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangent: Losses) -> tuple[jax.Array, ...]:
        # The objective's is a number, the loss scale; the others have no gradient.
        hidden_gradient, kernel_gradient = residuals
        return (hidden_gradient * cotangent.objective).astype(hidden_BTD.dtype), kernel_gradient * cotangent.objective

    run.defvjp(forward, backward)
    found = run(hidden_BTD, kernel_DV)
    return Losses(found.objective, *map(jax.lax.stop_gradient, found[1:]))


def _loop(add: Any, carry: Any, inputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    """A scan; of one round not as a loop."""
    if len(inputs[0]) > 1:
        return jax.lax.scan(add, carry, inputs)
    carry, outputs = add(carry, tuple(x[0] for x in inputs))
    return carry, jax.tree.map(lambda x: x[None], outputs)
