"""Value embeddings: embeddings of tokens that are added to the values of attention.

Karpathy 2026, nanochat, after the value residuals of Zhou et al. 2024, "Value Residual Learning". With the id of a
token t, the normalized input h of attention, and a table and a gate of the layer:

    v[t, k] += 3 · sigmoid(Σ_c gate[c, k] · h[t, c]) · table[id[t], k]

Without a gate, the factor is 1. An embedding depends only on the id of its own token, so a cache contains it in its
values.

Shapes: B batch, T length, V vocabulary, C channels of the gate, K key/value heads, H head dim, W = K·H, L layers with a
value embedding.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.embedding import look_up
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.linear import parameter
from maxlm.parallel.partitioning import Partitioning

# Names of the decoder's attributes with the tables and the gates of all layers.
VALUE_TABLES, VALUE_GATES = 'value_embeddings', 'value_gates'
# Largest factor of an embedding.
MAX_FACTOR = 3
# The gates start slightly above half of the largest factor, as in nanochat.
_initial_gate = jax.nn.initializers.uniform(0.02)
_TABLE_AXES = ('vocab', 'embed')


class ValueEmbeddings(NamedTuple):
    """Value embeddings of one layer, or stacked over several layers.

    Attributes:
        table_VW: table as stored; None if `rows_BTW` is given.
        rows_BTW: rows of the table for the tokens of the call.
        gate_CK: kernel of the gate; None without a gate.
    """

    table_VW: jax.Array | None
    rows_BTW: jax.Array | None
    gate_CK: jax.Array | None


def value_parameters(config: ModelConfig, rngs: nnx.Rngs) -> tuple[nnx.Param | None, nnx.Param | None]:
    """Returns the tables [L, V, W] and the gates [L, C, K] of a model; None for those that it does not have."""
    L, C, K = sum(value_layers(config)), config.value_gate_channels, config.num_kv_heads
    if not L:
        return None, None
    # One axis, because the heads and the vocabulary cannot both be sharded over the devices of `tensor`.
    shape = (L, config.vocab_size, K * config.head_dim)
    # Initial values of tables do not depend on the width; see `maxlm.model.layers.transfer`.
    base = dataclasses.replace(config, dim=config.base_dim or config.dim)
    # All stages of a pipeline have the first dense layers, so the stages cannot shard the stack.
    layers = 'dense_layers' if any(value_layers(config)[: config.num_dense_layers]) else 'layers'
    tables = parameter(rngs, shape, (layers, *_TABLE_AXES), initializers(base).projection)
    if not C:
        return tables, None
    return tables, parameter(rngs, (L, C, K), (layers, 'gate_channels', 'kv_heads'), _initial_gate)


def values_of(tables: nnx.Param | None, gates: nnx.Param | None) -> ValueEmbeddings | None:
    """Returns the value embeddings with these parameters; None without tables."""
    if tables is None:
        return None
    return ValueEmbeddings(tables[...], None, None if gates is None else gates[...])


def value_layers(config: ModelConfig) -> list[bool]:
    """Returns for each layer whether it has a value embedding."""
    pattern, L = config.value_embedding_pattern, config.num_layers
    return [bool(pattern) and pattern[(i - L) % len(pattern)] == 'V' for i in range(L)]


def looked_up(values: ValueEmbeddings, tokens_BT: jax.Array, partitioning: Partitioning) -> ValueEmbeddings:
    """Returns the value embeddings of all layers with their rows instead of their tables, for calls with a cache.

    A decoding step reads only a few rows. In a loop over layers, it would copy the table of each layer. Tables that are
    sharded to save memory are returned unchanged, because each layer gathers its table only for its own computation.
    """
    assert values.table_VW is not None, 'the rows are given already'
    if partitioning.num_shards('embed') > 1:
        return values
    rows_LBTW = partitioning.constrain(values.table_VW[:, tokens_BT], ('layers', 'batch', 'length', 'activation'))
    return values._replace(table_VW=None, rows_BTW=rows_LBTW)


def value_embedding(
    values: ValueEmbeddings, x_BTD: jax.Array, tokens_BT: jax.Array, num_heads: int, partitioning: Partitioning
) -> jax.Array:
    """Returns what a layer adds to its values, [B, T, K, H] in the dtype of x.

    Args:
        values: value embeddings of the layer.
        x_BTD: normalized input of attention.
        tokens_BT: token ids.
        num_heads: number of key/value heads K.
        partitioning: partitioning of the model.
    """
    rows_BTW = values.rows_BTW
    if rows_BTW is None:
        assert values.table_VW is not None, 'a layer has a table or rows'
        table_VW = partitioning.pad_vocabulary(values.table_VW.astype(x_BTD.dtype), _TABLE_AXES)
        rows_BTW = look_up(partitioning.gathered(table_VW, _TABLE_AXES), tokens_BT, _TABLE_AXES, partitioning)
    rows_BTKH = rows_BTW.astype(x_BTD.dtype).reshape(*tokens_BT.shape, num_heads, -1)
    rows_BTKH = partitioning.constrain(rows_BTKH, ('batch', 'length', 'kv_heads', 'head_dim'))
    if values.gate_CK is None:
        return rows_BTKH
    gate_CK = values.gate_CK.astype(x_BTD.dtype)
    logits_BTK = jnp.dot(x_BTD[..., : len(gate_CK)], gate_CK, preferred_element_type=jnp.float32)
    factors_BTK = MAX_FACTOR * jax.nn.sigmoid(logits_BTK)
    return (factors_BTK[..., None] * rows_BTKH).astype(x_BTD.dtype)
