"""The decoder: embedding, blocks in a loop, final norm, logits. All families are settings of this one model.

Shapes: B batch, T query length, S key length, D dim, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.keys import ModelConfig
from maxlm.model.attention import Attention, LayerCache
from maxlm.model.feedforward import FeedForward
from maxlm.model.linear import Constrain, Linear, parameter, unconstrained
from maxlm.model.norm import Norm
from maxlm.model.positions import Rotary, rotary_angles

ACTIVATION_AXES = ('batch', 'length', 'activation')


class Cache(NamedTuple):
    """Keys and values of all layers; slot s of a row holds its position s."""

    key_LBSKH: jax.Array
    value_LBSKH: jax.Array


class Context(NamedTuple):
    """What every block of one call shares."""

    mask_BTS: jax.Array | None
    positions_BT: jax.Array
    rotary: Rotary | None


class Block(nnx.Module):
    """Pre-norm residual block: attention, then feed-forward; side by side with `parallel_residual`."""

    def __init__(self, config: ModelConfig, *, constrain: Constrain, rngs: nnx.Rngs):
        self.attention_norm = Norm(config, rngs=rngs)
        self.attention = Attention(config, constrain=constrain, rngs=rngs)
        self.feedforward_norm = Norm(config, rngs=rngs)
        self.feedforward = FeedForward(config, constrain=constrain, rngs=rngs)
        self.parallel_residual = config.parallel_residual
        self.dropout = config.dropout
        self.constrain = constrain

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: LayerCache | None, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LayerCache | None]:
        attention_key, feedforward_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        attended_BTD, cache = self.attention(
            self.attention_norm(x_BTD),
            mask_BTS=context.mask_BTS,
            positions_BT=context.positions_BT,
            rotary=context.rotary,
            cache=cache,
        )
        attended_BTD = drop(attended_BTD, self.dropout, attention_key)
        stream_BTD = x_BTD if self.parallel_residual else x_BTD + attended_BTD
        fed_BTD = drop(self.feedforward(self.feedforward_norm(stream_BTD)), self.dropout, feedforward_key)
        y_BTD = x_BTD + attended_BTD + fed_BTD if self.parallel_residual else stream_BTD + fed_BTD
        return self.constrain(y_BTD, ACTIVATION_AXES), cache


class Decoder(nnx.Module):
    """Token ids → hidden states → logits."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, constrain: Constrain = unconstrained):
        """Makes the parameters; `config` is resolved. `constrain` places activations on a mesh."""
        normal = jax.nn.initializers.normal(config.init_std)
        self.embedding = parameter(rngs, (config.vocab_size, config.dim), ('vocab', 'embed'), normal)
        learned = config.position == 'learned'
        self.position_embedding = (
            parameter(rngs, (config.max_positions, config.dim), ('position', 'embed'), normal) if learned else None
        )
        self.blocks = _stacked(lambda rngs: Block(config, constrain=constrain, rngs=rngs), config.num_layers, rngs)
        self.final_norm = Norm(config, rngs=rngs)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(
                (config.dim,),
                (config.vocab_size,),
                in_axes=('embed',),
                out_axes=('vocab',),
                std=config.init_std,
                use_bias=False,
                rngs=rngs,
            )
        )
        self.config = config
        self.constrain = constrain

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        cache: Cache | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Hidden states [B, T, D] after the final norm, and the updated cache.

        Args:
            tokens_BT: token ids.
            segments_BT: number of the document that a token belongs to; tokens see their own document only. None:
                every row is one document.
            positions_BT: position of each token in its document, and its slot in the cache; None: 0, 1, 2, …
            cache: keys and values of earlier calls. A query then sees the slots up to its own position; `segments_BT`
                must be None.
            dropout_key: None turns dropout off.
        """
        config = self.config
        B, T = tokens_BT.shape
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        x_BTD = self.embedding[...].astype(config.dtype)[tokens_BT]
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding[...].astype(config.dtype)[positions_BT]
        embed_key, blocks_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x_BTD = drop(self.constrain(x_BTD, ACTIVATION_AXES), config.dropout, embed_key)

        context = Context(
            mask_BTS=_mask(T, segments_BT, positions_BT, cache),
            positions_BT=positions_BT,
            rotary=rotary_angles(
                positions_BT, head_dim=config.head_dim, fraction=config.rotary_fraction, theta=config.rotary_theta
            )
            if config.position == 'rotary'
            else None,
        )
        x_BTD, cache = self._run_blocks(x_BTD, context, cache, blocks_key)
        return self.final_norm(x_BTD), cache

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Scores of the next token [B, T, V] in float32."""
        if self.head is None:
            kernel_DV = self.embedding[...].T
        else:
            kernel_DV = self.head.kernel[...]
        B, T, D = hidden_BTD.shape
        kernel_DV = kernel_DV.astype(hidden_BTD.dtype)
        logits_BTV = jnp.dot(hidden_BTD.reshape(B * T, D), kernel_DV, preferred_element_type=jnp.float32)
        logits_BTV = logits_BTV.reshape(B, T, -1)
        return self.constrain(logits_BTV, ('batch', 'length', 'vocab'))

    def _run_blocks(
        self, x_BTD: jax.Array, context: Context, cache: Cache | None, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Cache | None]:
        config = self.config
        graph, blocks_L = nnx.split(self.blocks)
        keys_L = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)

        def layer(x_BTD: jax.Array, inputs: Any) -> tuple[jax.Array, LayerCache | None]:
            block, cache, key = inputs
            return nnx.merge(graph, block)(x_BTD, context, cache, key)

        layer = rematerialize(layer, config.remat, in_loop=config.scan_layers)
        caches_L = None if cache is None else LayerCache(*cache)
        inputs_L = (blocks_L, caches_L, keys_L)
        if config.scan_layers:
            x_BTD, caches_L = jax.lax.scan(layer, x_BTD, inputs_L)
        else:
            caches = []
            for index in range(config.num_layers):
                x_BTD, layer_cache = layer(x_BTD, jax.tree.map(lambda leaf, i=index: leaf[i], inputs_L))
                caches.append(layer_cache)
            caches_L = None if cache is None else jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
        return x_BTD, None if caches_L is None else Cache(*caches_L)


def init_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """An empty cache for `batch` rows of up to `slots` positions each, in the type of the computation."""
    shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout (Srivastava et al. 2014); the identity without a key or at rate 0."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def rematerialize(layer: Callable, policy: str, *, in_loop: bool) -> Callable:
    """Wraps a layer so that its backward pass computes again what `model.remat` does not keep."""
    if policy == 'none':
        return layer
    policies = jax.checkpoint_policies

    def keep_attention(primitive: Any, *_: Any, **__: Any) -> bool:
        # cuDNN's forward returns softmax statistics that carry no name; recomputing them means running it twice.
        return 'dot_product_attention_fwd' in primitive.name

    keep = {
        'dots': policies.save_from_both_policies(policies.dots_saveable, keep_attention),
        'dots_no_batch': policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, keep_attention),
        'full': policies.nothing_saveable,
    }[policy]
    # A loop already keeps XLA from merging the two computations; the barrier would only cost.
    return jax.checkpoint(layer, policy=keep, prevent_cse=not in_loop)


def _mask(length: int, segments_BT: jax.Array | None, positions_BT: jax.Array, cache: Cache | None) -> jax.Array | None:
    """True where a query may look, [B, T, S]; None is plain causal, which kernels know by themselves."""
    if cache is not None:
        assert segments_BT is None, 'a cached call has one document per row'
        slots = cache.key_LBSKH.shape[2]
        return jnp.arange(slots) <= positions_BT[:, :, None]
    if segments_BT is None:
        return None
    same_document_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_document_BTS & jnp.tril(jnp.ones((length, length), bool))


def _stacked(make: Callable[[nnx.Rngs], nnx.Module], num: int, rngs: nnx.Rngs) -> nnx.Module:
    """`num` modules as one, whose parameters have a leading `layers` axis."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), num)
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)

    def name_axis(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(axes=('layers', *variable.axes))

    state = jax.tree.map(name_axis, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graph, state)
