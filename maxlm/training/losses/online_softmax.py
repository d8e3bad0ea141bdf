"""Log-sum-exp of logits and the logit of the target, computed in one pass over the logits.

The running maximum and the sum of exponentials relative to it are updated together (Milakov & Gimelshein 2018, "Online
normalizer calculation for softmax"). The usual computation reads the logits once for the maximum and again for the sum.

Shapes: V vocabulary; targets have the leading axes of the logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Maximum, sum of exponentials relative to it, and sum of the logits of the target.
Sums = tuple[jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def online_softmax(scores: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log Σ exp(logits) and the logit of the target, from float32 logits [..., V] and targets [...].

    Examples:
        >>> log_z, logit = online_softmax(jnp.zeros((2, 8)), jnp.array([3, 5]))
        >>> log_z.round(3), logit
        (Array([2.079, 2.079], dtype=float32), Array([0., 0.], dtype=float32))
    """

    def combine(left: Sums, right: Sums) -> Sums:
        maximum = jnp.maximum(left[0], right[0])
        total = left[1] * jnp.exp(left[0] - maximum) + right[1] * jnp.exp(right[0] - maximum)
        return maximum, total, left[2] + right[2]

    parts = scores, jnp.ones_like(scores), jnp.where(_is_target(scores, targets), scores, 0)
    zero = jnp.zeros((), scores.dtype)
    # The initial maximum is finite, because the difference of two infinities is not a number.
    initial = jnp.full_like(zero, jnp.finfo(scores.dtype).min), zero, zero
    maximum, total, logit = jax.lax.reduce(parts, initial, combine, (scores.ndim - 1,))
    return maximum + jnp.log(total), logit


def _forward(scores: jax.Array, targets: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    log_z, logit = online_softmax(scores, targets)
    return (log_z, logit), (scores, targets, log_z)


def _backward(residuals: tuple[jax.Array, ...], gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    scores, targets, log_z = residuals
    of_log_z, of_logit = (gradient[..., None] for gradient in gradients)
    gradient = of_log_z * jnp.exp(scores - log_z[..., None])
    return gradient + jnp.where(_is_target(scores, targets), of_logit, 0), None


def _is_target(scores: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1) == targets[..., None]


online_softmax.defvjp(_forward, _backward)
