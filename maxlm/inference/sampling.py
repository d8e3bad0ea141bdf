"""Samples the next token from logits: temperature, top-k, top-p, min-p and repetition penalty.

Shapes: B rows, V vocabulary, W words of 32 tokens, C reported top tokens.
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

# An array on the host or on devices.
Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request.

    Attributes:
        temperature: divisor of the logits; 0 = greedy.
        top_k: sample only from the k most likely tokens; 0 = all.
        top_p: sample only from the most likely tokens whose probabilities sum to this value (Holtzman et al. 2020);
            1 = all.
        min_p: sample only tokens with at least this fraction of the highest probability (Nguyen et al. 2024);
            0 = all.
        repetition_penalty: for tokens of the prompt or continuation, positive logits are divided by this value and
            negative logits are multiplied by it (Keskar et al. 2019, "CTRL"); 1 = none.
        presence_penalty: subtracted once from the logit of each generated token, as in the OpenAI API.
        frequency_penalty: subtracted from the logit of each generated token once per occurrence.

    Raises:
        InputError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ('temperature', 'repetition_penalty', 'presence_penalty', 'frequency_penalty'):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f'{name}={getattr(self, name)}: must be a finite number')
        if not self.temperature >= 0:
            raise InputError(f'temperature={self.temperature}: must be at least 0')
        if not isinstance(self.top_k, int | np.integer):
            raise InputError(f'top_k={self.top_k!r}: must be an integer')
        if not 0 <= self.top_k < 2**31:
            raise InputError(f'top_k={self.top_k}: must be at least 0 (0 = all tokens)')
        if not 0 < self.top_p <= 1:
            raise InputError(f'top_p={self.top_p}: must be above 0 and at most 1')
        if not 0 <= self.min_p <= 1:
            raise InputError(f'min_p={self.min_p}: must be from 0 to 1')
        if not self.repetition_penalty > 0:
            raise InputError(f'repetition_penalty={self.repetition_penalty}: must be above 0')

    @property
    def is_truncated(self) -> bool:
        """True if top-k, top-p or min-p excludes tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalty(self) -> bool:
        """True if the logits of a token depend on whether it has occurred."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class TokenMask(NamedTuple):
    """Allowed tokens of each row.

    Attributes:
        words_BW: int32; bit i of word w is 1 if token 32·w + i is allowed.
        is_active: False if all tokens are allowed in all rows.
        forced_BF: int32; tokens that the next ones of a row must be, before the mask applies; -1 after the last one.
    """

    words_BW: Array
    is_active: Array
    forced_BF: Array


class Rows(NamedTuple):
    """Sampling settings of a batch, one entry per row."""

    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    min_p_B: Array
    repetition_penalty_B: Array
    presence_penalty_B: Array
    frequency_penalty_B: Array


def stack_settings(settings: Sequence[Sampling]) -> Rows:
    """Stacks settings into one array per field, on the host."""
    return Rows(
        *(
            np.array([getattr(row, name.removesuffix('_B')) for row in settings], dtype)
            for name, dtype in zip(Rows._fields, (np.float32, np.int32, *[np.float32] * 5), strict=True)
        )
    )


def sampling_keys(seed_B: Array, sample_B: Array, position_B: jax.Array) -> jax.Array:
    """Returns one sampling key per row, which depends only on seed, sample and position.

    Args:
        seed_B: request seeds, uint32.
        sample_B: sample indices within their requests, uint32.
        position_B: positions of the last known tokens.
    """

    def key(seed: Array, sample: Array, position: Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)

    return jax.vmap(key)(seed_B, sample_B, position_B)


def sample(logits_BV: jax.Array, keys_B: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """Samples one token id per row, int32 [B], at one temperature for all rows; 0 = greedy.

    Each row has its own key, so results do not depend on the other rows.
    """

    def categorical() -> jax.Array:
        return jax.vmap(jax.random.categorical)(keys_B, logits_BV / temperature).astype(jnp.int32)

    return jax.lax.cond(jnp.asarray(temperature) > 0, categorical, lambda: _argmax(logits_BV))


def sample_rows(logits_BV: jax.Array, keys_B: jax.Array, rows: Rows) -> jax.Array:
    """Samples one token id per row, int32 [B], with the settings of each row.

    Penalties are not applied here; call `apply_penalties` first.
    """

    def categorical() -> jax.Array:
        # Greedy rows are divided by 1; their scaled logits are unused.
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
    """Returns the logits with -inf for tokens excluded by top-k, top-p or min-p.

    The most likely token is always kept. Tokens tied with the least likely kept token are kept too.

    Examples:
        >>> logits_BV = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
        >>> kept_BV = top_k_mask(logits_BV, top_k_B=jnp.array([0]), top_p_B=jnp.array([0.7]), min_p_B=jnp.array([0.0]))
        >>> jnp.isfinite(kept_BV)
        Array([[ True,  True, False]], dtype=bool)
    """
    V = logits_BV.shape[1]
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
    # A token is kept if the probabilities of all likelier tokens sum to less than top_p.
    keep_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV < top_p_B[:, None]
    keep_BV |= (top_p_B >= 1)[:, None]
    keep_BV &= jnp.arange(V)[None, :] < jnp.where(top_k_B > 0, top_k_B, V)[:, None]
    keep_BV &= probability_BV >= min_p_B[:, None] * probability_BV[:, :1]
    # Each condition keeps a prefix of the sorted order, and so does their intersection.
    last_B1 = jnp.maximum(keep_BV.sum(axis=-1, keepdims=True) - 1, 0)
    return jnp.where(logits_BV >= jnp.take_along_axis(sorted_BV, last_B1, axis=-1), logits_BV, -jnp.inf)


def apply_penalties(logits_BV: jax.Array, rows: Rows, in_prompt_BV: jax.Array, counts_BV: jax.Array) -> jax.Array:
    """Returns the logits after repetition, presence and frequency penalties.

    Args:
        logits_BV: logits of the next token.
        rows: sampling settings.
        in_prompt_BV: True where the prompt contains the token.
        counts_BV: number of occurrences of the token in the continuation.

    Examples:
        >>> rows = stack_settings([Sampling(frequency_penalty=0.5)])
        >>> apply_penalties(jnp.ones((1, 3)), rows, jnp.zeros((1, 3), bool), jnp.array([[0, 1, 2]])).tolist()
        [[1.0, 0.5, 0.0]]
    """
    is_generated_BV = counts_BV > 0
    penalty_B1 = rows.repetition_penalty_B[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    logits_BV = jnp.where(is_generated_BV | in_prompt_BV, repeated_BV, logits_BV)
    return (
        logits_BV - rows.presence_penalty_B[:, None] * is_generated_BV - rows.frequency_penalty_B[:, None] * counts_BV
    )


def apply_mask(logits_BV: jax.Array, mask: TokenMask) -> jax.Array:
    """Returns the logits with -inf for tokens that the mask excludes."""

    def masked() -> jax.Array:
        V = logits_BV.shape[1]
        bits_BW32 = jnp.asarray(mask.words_BW)[:, :, None] >> jnp.arange(32)[None, None, :]
        return jnp.where((bits_BW32.reshape(len(bits_BW32), -1)[:, :V] & 1) == 1, logits_BV, -jnp.inf)

    return jax.lax.cond(mask.is_active, masked, lambda: logits_BV)


def apply_forced(token_TB: jax.Array, forced_BF: Array, done_B: jax.Array) -> jax.Array:
    """Returns the sampled tokens, or the forced ones where there are any.

    Args:
        token_TB: tokens sampled at successive positions.
        forced_BF: forced tokens, see `TokenMask`.
        done_B: number of forced tokens, and of tokens after them, that precede the first position.
    """
    last = forced_BF.shape[1] - 1
    index_BT = done_B[:, None] + jnp.arange(len(token_TB))[None, :]
    forced_BT = jnp.take_along_axis(jnp.asarray(forced_BF), jnp.minimum(index_BT, last), axis=1)
    return jnp.where((forced_BT >= 0) & (index_BT <= last), forced_BT, token_TB.T).T


def has_penalty(rows: Rows) -> jax.Array:
    """Returns True for each row with a penalty, bool [B]."""
    has_additive_B = (rows.presence_penalty_B != 0) | (rows.frequency_penalty_B != 0)
    return jnp.asarray((rows.repetition_penalty_B != 1) | has_additive_B)


def log_prob(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    """Returns log softmax(logits)[token] in nats, [B]."""
    # A masked sum instead of a gather keeps a sharded vocabulary sharded, as in training.
    is_token_BV = jnp.arange(logits_BV.shape[1])[None, :] == token_B[:, None]
    return jnp.where(is_token_BV, logits_BV, 0).sum(axis=-1) - jax.nn.logsumexp(logits_BV, axis=-1)


def top_log_probs(logits_BV: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Returns ids and log-probabilities of the `num` most likely tokens, [B, C] each, in descending order.

    Examples:
        >>> ids_BC, log_probs_BC = top_log_probs(jnp.log(jnp.array([[0.2, 0.5, 0.3]])), num=2)
        >>> ids_BC, jnp.exp(log_probs_BC).round(3)
        (Array([[1, 2]], dtype=int32), Array([[0.5, 0.3]], dtype=float32))
    """
    logits_BC, ids_BC = jax.lax.top_k(logits_BV, num)
    return ids_BC, logits_BC - jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)


def _argmax(logits_BV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
