"""Log-probabilities of given tokens from hidden states, with the logits of a few positions in memory at a time.

Shapes: P prompts per call, T tokens of a chunk, M positions of a block, R = P·M rows, D dim, V vocabulary, C reported
top tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxlm.inference.sampling import log_prob

# Maximum number of positions per prompt whose logits are held in memory.
BLOCK = 128


def score_positions(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden_PTD: jax.Array,
    target_PT: jax.Array,
    with_top: jax.Array,
    *,
    num_ids: int,
    num_top: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probability of the token that follows each position, and the most likely tokens.

    The probabilities are over all ids of the model. The most likely tokens are ids of the tokenizer.

    Args:
        logits_of: function from hidden states [P, M, D] to logits [P, M, V] in float32.
        hidden_PTD: hidden states after the final norm.
        target_PT: ids of the tokens that follow.
        with_top: compute the most likely tokens; they have no meaning otherwise.
        num_ids: vocabulary size of the tokenizer.
        num_top: number of most likely tokens, C.

    Returns:
        Log-probabilities [P, T], and ids and log-probabilities of the most likely tokens [P, T, C].
    """
    P, T = target_PT.shape
    M = min(T, BLOCK)
    num_blocks = -(-T // M)

    def blocks(x_PT: jax.Array) -> jax.Array:
        padded_PT = jnp.pad(x_PT, [(0, 0), (0, num_blocks * M - T)] + [(0, 0)] * (x_PT.ndim - 2))
        return padded_PT.reshape(P, num_blocks, M, *x_PT.shape[2:]).swapaxes(0, 1)

    def score(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden_PMD, target_PM = block
        logits_RV = logits_of(hidden_PMD).reshape(P * M, -1)
        total_R1 = jax.nn.logsumexp(logits_RV, axis=-1, keepdims=True)
        logits_RC, ids_RC = jax.lax.cond(
            with_top,
            lambda: jax.lax.top_k(logits_RV[:, :num_ids], num_top),
            lambda: [jnp.zeros((P * M, num_top)), jnp.zeros((P * M, num_top), jnp.int32)],
        )
        found = log_prob(logits_RV, target_PM.reshape(-1)), ids_RC, logits_RC - total_R1
        return jax.tree.map(lambda x_R: x_R.reshape(P, M, *x_R.shape[1:]), found)

    found = jax.lax.map(score, (blocks(hidden_PTD), blocks(target_PT)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(P, num_blocks * M, *x.shape[3:])[:, :T], found)
