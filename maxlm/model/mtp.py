"""MTP modules (multi-token prediction, DeepSeek-AI 2024, "DeepSeek-V3", section 2.2), used only in training.

Module d predicts the token after next (d = 1) or a later one. It receives the hidden states of module d - 1, where
module 0 is the model itself, and the embedding of the token d positions ahead. Embedding and output head are those of
the model.

Shapes: B batch, T query length, D dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.blocks import ACTIVATION_AXES, Context, block_class
from maxlm.model.layer_loop import rematerialize
from maxlm.model.layers.embedding import look_up
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.linear import Linear
from maxlm.model.layers.masks import layer_kinds, window_of
from maxlm.model.layers.norm import Norm
from maxlm.parallel.partitioning import Partitioning

# Name of the decoder's attribute with the modules, which is the first part of the path of each of their parameters.
MTP = 'mtp'


class MtpModule(nnx.Module):
    """One module: a norm of each input, a projection of both to the model width, a block and a final norm.

    The checkpoints of DeepSeek-V3 name these parameters hnorm, enorm, eh_proj and shared_head.norm.
    """

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        D = config.dim
        self.hidden_norm = Norm(config, D, rngs=rngs)
        self.embedding_norm = Norm(config, D, rngs=rngs)
        self.projection = Linear(
            (2 * D,),
            (D,),
            in_axes=('embed',),
            # Only one axis of a parameter can be sharded over the devices of `embed`.
            out_axes=('activation',),
            init=initializers(config).projection,
            use_bias=False,
            matmul='default',
            partitioning=partitioning,
            rngs=rngs,
        )
        self.block = block_class(config)(config, partitioning=partitioning, rngs=rngs)
        self.final_norm = Norm(config, D, rngs=rngs)
        self.partitioning = partitioning

    def __call__(
        self,
        hidden_BTD: jax.Array,
        embedded_BTD: jax.Array,
        context: Context,
        window: int,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        """Returns the hidden states [B, T, D] after the final norm."""
        both = [self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)]
        x_BTD = self.projection(jnp.concatenate(both, axis=-1))
        x_BTD = self.partitioning.constrain(x_BTD, ACTIVATION_AXES)
        return self.final_norm(self.block(x_BTD, context, window, None, dropout_key)[0])


def run_mtp(
    modules: Any,
    config: ModelConfig,
    partitioning: Partitioning,
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    table_VD: jax.Array,
    context: Context,
    *,
    dropout_key: jax.Array | None,
) -> list[jax.Array]:
    """Returns the hidden states [B, T, D] of each module, from which the head predicts the token d + 1 positions ahead.

    Attention is that of the last layer. The last d positions of a row have no token d positions ahead. They, and the
    last d positions of a document, must have no weight in the loss. Earlier positions do not depend on them.

    Args:
        modules: modules, stacked along the first axis.
        config: config of the model.
        partitioning: partitioning of the model.
        hidden_BTD: hidden states of the model after its final norm.
        tokens_BT: token ids.
        table_VD: token embedding in the compute dtype, gathered.
        context: arguments that the blocks share.
        dropout_key: random key of dropout; None disables dropout.
    """
    graph, stack = nnx.split(modules)
    kind = layer_kinds(config)[-1]
    window, context = window_of(kind, config), context.for_layer(kind)

    def run(params: Any, hidden_BTD: jax.Array, embedded_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        hidden_BTD = nnx.merge(graph, params)(hidden_BTD, embedded_BTD, context, window, key)
        return partitioning.constrain(hidden_BTD, ACTIVATION_AXES)

    run = rematerialize(run, config.remat_policy, in_loop=False, gathers=partitioning.num_shards('embed') > 1)
    results = []
    for depth in range(1, config.mtp_depth + 1):
        params = jax.tree.map(lambda leaf, index=depth - 1: leaf[index], nnx.to_pure_dict(stack))
        embedded_BTD = look_up(table_VD, shift_left(tokens_BT, depth), ('vocab', 'embed'), partitioning)
        embedded_BTD = partitioning.constrain(embedded_BTD, ACTIVATION_AXES)
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, depth)
        hidden_BTD = run(params, hidden_BTD, embedded_BTD, key)
        results.append(hidden_BTD)
    return results


def shift_left(x_BT: jax.Array, num: int) -> jax.Array:
    """Moves the entry at position t + num to position t. The last `num` entries become 0."""
    return jnp.pad(x_BT[:, num:], ((0, 0), (0, num)))
