"""Drafts of the next tokens that are copied from the preceding text ("prompt lookup decoding", Saxena 2023).

The last tokens of the text are searched in the text itself. The tokens after the match are the draft. A forward pass
over the draft then gives the logits of several positions at once (Leviathan et al. 2023, "Fast inference from
transformers via speculative decoding").

Shapes: B slots, S positions, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

State = TypeVar('State')

# Numbers of last tokens that must be equal: at least MIN_MATCH, and the longest match up to MAX_MATCH is preferred.
MIN_MATCH, MAX_MATCH = 2, 4
# Maximum number of tokens drafted per pass. Every row of a pass computes all of them.
MAX_DRAFT_TOKENS = 32


def find_drafts(history_BS: jax.Array, length_B: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Returns drafts of the next `num` tokens, int32 [B, K], and True for each row with a match, bool [B].

    The draft follows the latest of the longest matches. If it reaches the end of the text, it continues with its own
    start, so that a text with a period shorter than `num` is drafted correctly. The draft of a row without a match is
    arbitrary.

    Args:
        history_BS: token ids of each text; tokens at positions from `length_B` are ignored.
        length_B: number of tokens of each text.
        num: number of tokens to draft, K.
    """
    S = history_BS.shape[1]
    position_S = jnp.arange(S)
    is_equal_BS = jnp.ones(history_BS.shape, bool)
    num_equal_BS = jnp.zeros(history_BS.shape, jnp.int32)
    for offset in range(MAX_MATCH):
        last_B1 = jnp.take_along_axis(history_BS, jnp.maximum(length_B - 1 - offset, 0)[:, None], axis=1)
        # Position p holds the token at p - offset.
        shifted_BS = jnp.roll(history_BS, offset, axis=1)
        is_equal_BS &= (shifted_BS == last_B1) & (position_S >= offset)[None, :]
        num_equal_BS += is_equal_BS
    # The last token itself is not a match.
    num_equal_BS = jnp.where(position_S[None, :] < length_B[:, None] - 1, num_equal_BS, 0)
    # The longest match, and among equally long ones the latest.
    end_B = jnp.argmax(num_equal_BS * S + position_S[None, :], axis=1)
    is_found_B = jnp.take_along_axis(num_equal_BS, end_B[:, None], axis=1)[:, 0] >= MIN_MATCH
    period_B1 = jnp.maximum(length_B - 1 - end_B, 1)[:, None]
    source_BK = end_B[:, None] + 1 + jnp.arange(num)[None, :] % period_B1
    return jnp.take_along_axis(history_BS, source_BK, axis=1, mode='clip'), is_found_B


def num_accepted(sampled_TB: jax.Array, drafts_KB: jax.Array) -> jax.Array:
    """Returns the number of drafted tokens before the first that differs from the sampled token, int32 [B].

    The token sampled at a position depends only on its logits and its key. A drafted token is accepted if it equals
    the sampled token, so the text is the same as without drafts, and so is its distribution.

    Args:
        sampled_TB: tokens sampled after the last token and after each drafted token, T = K + 1.
        drafts_KB: drafted tokens.
    """
    return jnp.cumprod(sampled_TB[:-1] == drafts_KB, axis=0, dtype=jnp.int32).sum(axis=0)


def run_if(condition: jax.Array, run: Callable[[State], State], state: State) -> State:
    """Returns `run(state)` if the condition is true, and `state` otherwise.

    XLA copies the operands of a conditional, but updates those of a loop in place.
    """
    _, state = jax.lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.zeros((), bool), run(carry[1])), (condition, state)
    )
    return state
