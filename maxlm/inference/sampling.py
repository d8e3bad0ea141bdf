"""Choosing the next token from logits.

Shapes: B rows, V vocabulary, C reported top tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.errors import InputError

# On the host or on devices.
Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request.

    Raises:
        InputError: a value is out of range.
    """

    # Logits are divided by it; 0 = always the likeliest token.
    temperature: float = 1.0
    # Only the k likeliest tokens can be drawn; 0 = all.
    top_k: int = 0
    # Only the likeliest tokens that together reach this probability can be drawn (Holtzman et al. 2020); 1 = all.
    top_p: float = 1.0
    # Only tokens that are at least this share as likely as the likeliest can be drawn (Nguyen et al. 2024); 0 = all.
    min_p: float = 0.0
    # Logits of tokens that are in prompt or continuation are divided by it where they are positive, else multiplied
    # (Keskar et al. 2019, "CTRL"); 1 = none.
    repetition_penalty: float = 1.0
    # Subtracted from the logits of generated tokens: once, and once per occurrence (as in OpenAI's API).
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ('temperature', 'repetition_penalty', 'presence_penalty', 'frequency_penalty'):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f'{name}={getattr(self, name)}: must be a finite number')
        if not self.temperature >= 0:
            raise InputError(f'temperature={self.temperature}: must be at least 0')
        if not 0 <= self.top_k < 2**31:
            raise InputError(f'top_k={self.top_k}: must be at least 0 (0 = all tokens)')
        if not 0 < self.top_p <= 1:
            raise InputError(f'top_p={self.top_p}: must be above 0 and at most 1')
        if not 0 <= self.min_p <= 1:
            raise InputError(f'min_p={self.min_p}: must be from 0 to 1')
        if not self.repetition_penalty > 0:
            raise InputError(f'repetition_penalty={self.repetition_penalty}: must be above 0')


class Rows(NamedTuple):
    """The settings of a batch, a row of it each."""

    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    min_p_B: Array
    repetition_penalty_B: Array
    presence_penalty_B: Array
    frequency_penalty_B: Array


def stack_settings(settings: Sequence[Sampling]) -> Rows:
    """Stacks settings into rows, on the host."""
    return Rows(
        *(
            np.array([getattr(row, name.removesuffix('_B')) for row in settings], dtype)
            for name, dtype in zip(Rows._fields, (np.float32, np.int32, *[np.float32] * 5), strict=True)
        )
    )


def sampling_keys(seed_B: Array, sample_B: Array, position_B: jax.Array) -> jax.Array:
    """The key of the draw behind each position of a sample: nothing else goes into it, so that a draw can be repeated.

    Args:
        seed_B: of the requests, uint32.
        sample_B: numbers of the samples in their requests, uint32.
        position_B: of the last tokens that are there.
    """

    def key(seed: Array, sample: Array, position: Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)

    return jax.vmap(key)(seed_B, sample_B, position_B)


def sample(logits_BV: jax.Array, keys_B: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """One token id per row, int32 [B], at one temperature for all; 0 is the likeliest.

    Each row has its own key, so its batch mates do not matter.
    """

    def categorical() -> jax.Array:
        return jax.vmap(jax.random.categorical)(keys_B, logits_BV / temperature).astype(jnp.int32)

    return jax.lax.cond(jnp.asarray(temperature) > 0, categorical, lambda: _argmax(logits_BV))


def sample_rows(logits_BV: jax.Array, keys_B: jax.Array, rows: Rows) -> jax.Array:
    """One token id per row, int32 [B], each by its own settings but for penalties, which `apply_penalties` applies."""

    def categorical() -> jax.Array:
        # A row that takes the likeliest is divided by anything.
        scaled_BV = logits_BV / jnp.where(rows.temperature_B > 0, rows.temperature_B, 1)[:, None]
        is_truncated_B = (rows.top_k_B > 0) | (rows.top_p_B < 1) | (rows.min_p_B > 0)
        filtered_BV = jax.lax.cond(
            (is_truncated_B & (rows.temperature_B > 0)).any(),
            lambda: top_k_mask(scaled_BV, top_k_B=rows.top_k_B, top_p_B=rows.top_p_B, min_p_B=rows.min_p_B),
            lambda: scaled_BV,
        )
        sampled_B = jax.vmap(jax.random.categorical)(keys_B, filtered_BV).astype(jnp.int32)
        return jnp.where(rows.temperature_B > 0, sampled_B, _argmax(logits_BV))

    return jax.lax.cond((rows.temperature_B > 0).any(), categorical, lambda: _argmax(logits_BV))


def top_k_mask(logits_BV: jax.Array, *, top_k_B: Array, top_p_B: Array, min_p_B: Array) -> jax.Array:
    """The logits with -inf where top-k, top-p or min-p exclude a token.

    The likeliest token always stays, and so does one that is exactly as likely as the last that does.
    """
    V = logits_BV.shape[1]
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
    # A token stays if those before it have not reached top_p yet.
    keep_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV < top_p_B[:, None]
    keep_BV |= (top_p_B >= 1)[:, None]
    keep_BV &= jnp.arange(V)[None, :] < jnp.where(top_k_B > 0, top_k_B, V)[:, None]
    keep_BV &= probability_BV >= min_p_B[:, None] * probability_BV[:, :1]
    # Each condition ends somewhere in the order, so what stays is a beginning of it.
    last_B1 = jnp.maximum(keep_BV.sum(axis=-1, keepdims=True) - 1, 0)
    return jnp.where(logits_BV >= jnp.take_along_axis(sorted_BV, last_B1, axis=-1), logits_BV, -jnp.inf)


def apply_penalties(logits_BV: jax.Array, rows: Rows, in_prompt_BV: jax.Array, counts_BV: jax.Array) -> jax.Array:
    """The logits after penalties for what was there already.

    Args:
        logits_BV: of the next token.
        rows: the settings.
        in_prompt_BV: whether the prompt has the token.
        counts_BV: how often the continuation has it.
    """
    is_generated_BV = counts_BV > 0
    penalty_B1 = rows.repetition_penalty_B[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    logits_BV = jnp.where(is_generated_BV | in_prompt_BV, repeated_BV, logits_BV)
    return (
        logits_BV - rows.presence_penalty_B[:, None] * is_generated_BV - rows.frequency_penalty_B[:, None] * counts_BV
    )


def has_penalty(rows: Rows) -> jax.Array:
    """Returns whether any row has a penalty."""
    has_additive_B = (rows.presence_penalty_B != 0) | (rows.frequency_penalty_B != 0)
    return ((rows.repetition_penalty_B != 1) | has_additive_B).any()


def log_prob(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    """log softmax(logits)[token] in nats, [B]."""
    # A sum over a selection, as in training: a vocabulary that is split stays so.
    is_token_BV = jnp.arange(logits_BV.shape[1])[None, :] == token_B[:, None]
    return jnp.where(is_token_BV, logits_BV, 0).sum(axis=-1) - jax.nn.logsumexp(logits_BV, axis=-1)


def top_log_probs(logits_BV: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Returns ids and log-probabilities of the `num` likeliest tokens, [B, C] each, in descending order."""
    logits_BC, ids_BC = jax.lax.top_k(logits_BV, num)
    return ids_BC, logits_BC - jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)


def _argmax(logits_BV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
