"""Choosing the next token from logits.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from maxlm.errors import InputError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Raises:
        InputError: a value is out of range.
    """

    # Logits are divided by it; 0 = always the likeliest token.
    temperature: float = 1.0
    # Only the k likeliest tokens can be drawn; 0 = all.
    top_k: int = 0
    # Only the likeliest tokens that together reach this probability can be drawn (Holtzman et al. 2020); 1 = all.
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise InputError(f'temperature={self.temperature}: must be at least 0')
        if self.top_k < 0:
            raise InputError(f'top_k={self.top_k}: must be at least 0 (0 = all tokens)')
        if not 0 < self.top_p <= 1:
            raise InputError(f'top_p={self.top_p}: must be above 0 and at most 1')


def sample(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """One token id per row, int32 [B]. Each row has its own key, so its batch mates do not matter."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = keep_likeliest(logits_BV / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def keep_likeliest(logits_BV: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    """The logits with -inf where top-k or top-p exclude a token. The likeliest token always stays."""
    if not top_k and top_p >= 1:
        return logits_BV
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
    # A token stays if those before it have not reached top_p yet.
    kept_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV < top_p
    if top_k:
        kept_BV &= jnp.arange(logits_BV.shape[-1]) < top_k
    sorted_BV = jnp.where(kept_BV, sorted_BV, -jnp.inf)
    rows_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    return jnp.zeros_like(logits_BV).at[rows_B1, order_BV].set(sorted_BV)
