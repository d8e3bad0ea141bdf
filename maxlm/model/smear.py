"""Smear: each token's embedding receives a gated multiple of the previous token's (Karpathy 2026, nanochat).

x[t] ← x[t] + s · σ(Σ_c w[c] · x[t, c]) · x[t - 1], where c runs over the first C = `model.smear_channels` channels, w
is `smear_gate` and s is `smear_scale`. The first token of a row is unchanged. If documents are separate, the first
token of each document is unchanged, too; those of nanochat are not separate.

The embedding of the previous token follows from its id. A call that starts within a text needs only this id.

Shapes: B batch, T length, D dim, C channels of the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.model.attention.ring import zigzag
from maxlm.parallel.partitioning import Partitioning

# Id of a previous token that does not exist.
NO_TOKEN = -1


class PreviousTokens(NamedTuple):
    """The previous tokens of the tokens of a call.

    Attributes:
        tokens_BT: ids of the tokens themselves. If the length is sharded, they are in zigzag order.
        positions_BT: their positions.
        segments_BT: number of each token's document; None: each row is one document.
        previous_BT: ids of the previous tokens, or NO_TOKEN; None: those of the rows, which are complete.
        embed: function from ids and positions [B, T] to embeddings [B, T, D].
        partitioning: partitioning of the model.
    """

    tokens_BT: jax.Array
    positions_BT: jax.Array
    segments_BT: jax.Array | None
    previous_BT: jax.Array | None
    embed: Callable[[jax.Array, jax.Array], jax.Array]
    partitioning: Partitioning

    def embedded(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the embeddings of the previous tokens, and where there are such tokens.

        Devices that share the length exchange token ids instead of embeddings.

        Args:
            x_BTD: embeddings of the tokens themselves.
        """
        if self.previous_BT is not None:
            places_BT = jnp.maximum(self.positions_BT - 1, 0)
            return self.embed(jnp.maximum(self.previous_BT, 0), places_BT), self.previous_BT != NO_TOKEN
        T, num_shards = self.tokens_BT.shape[1], self.partitioning.num_shards('length')
        order = np.asarray(zigzag(T, num_shards)) if num_shards > 1 else np.arange(T)
        # Index of the previous token of each index; the first token has none.
        source = np.argsort(order)[np.maximum(order - 1, 0)]
        has_previous_BT = jnp.broadcast_to(order > 0, self.tokens_BT.shape)
        if self.segments_BT is not None:
            has_previous_BT &= self.segments_BT == self.segments_BT[:, source]
        if num_shards == 1:
            return jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0))), has_previous_BT
        moved = [x_BT[:, source] for x_BT in (self.tokens_BT, self.positions_BT)]
        return self.embed(*(self.partitioning.constrain(x_BT, ('batch', 'length')) for x_BT in moved)), has_previous_BT


def smear(x_BTD: jax.Array, previous: PreviousTokens, gate_C: jax.Array, scale_1: jax.Array) -> jax.Array:
    """Returns the smeared embeddings, computed in float32, in the dtype of x.

    Args:
        x_BTD: embeddings of the tokens.
        previous: previous tokens of the call.
        gate_C: weights w of the gate, float32.
        scale_1: factor s, float32.
    """
    previous_BTD, has_previous_BT = previous.embedded(x_BTD)
    full_BTD = x_BTD.astype(jnp.float32)
    gate_BT = scale_1[0] * jax.nn.sigmoid(full_BTD[..., : gate_C.size] @ gate_C)
    gate_BT = jnp.where(has_previous_BT, gate_BT, 0)
    return (full_BTD + gate_BT[..., None] * previous_BTD).astype(x_BTD.dtype)


def previous_ids(tokens_BT: jax.Array, before_B: jax.Array) -> jax.Array:
    """Returns the ids of the previous tokens of consecutive tokens, whose first follows `before_B` (or NO_TOKEN)."""
    return jnp.concatenate([before_B[:, None].astype(tokens_BT.dtype), tokens_BT[:, :-1]], axis=1)
