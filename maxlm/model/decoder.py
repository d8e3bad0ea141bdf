"""The decoder: embedding, blocks in a loop, final norm, logits. All families are settings of this one model.

Shapes: B batch, T query length, S key length, D dim, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.keys import ModelConfig
from maxlm.model.attention import Attention, LayerCache, causal_mask
from maxlm.model.feedforward import FeedForward
from maxlm.model.initializers import initializers
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

    # By the layer's window: where its queries may look, see `Attention`.
    masks: dict[int, jax.Array | None]
    positions_BT: jax.Array
    rotary: Rotary | None


class Block(nnx.Module):
    """Pre-norm residual block: attention, then feed-forward; side by side with `parallel_residual`."""

    def __init__(self, config: ModelConfig, *, constrain: Constrain, rngs: nnx.Rngs):
        self.attention_norm = Norm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, constrain=constrain, rngs=rngs)
        self.feedforward_norm = Norm(config, config.dim, rngs=rngs)
        self.feedforward = FeedForward(config, constrain=constrain, rngs=rngs)
        self.parallel_residual = config.parallel_residual
        self.dropout = config.dropout
        self.constrain = constrain

    def __call__(
        self, x_BTD: jax.Array, context: Context, window: int, cache: LayerCache | None, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Returns the stream [B, T, D] and the layer's cache; `window` is how far it sees, 0 for all."""
        attention_key, feedforward_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        attended_BTD, cache = self.attention(
            self.attention_norm(x_BTD),
            mask_BTS=context.masks[window],
            positions_BT=context.positions_BT,
            rotary=context.rotary,
            window=window,
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
        init = initializers(config)
        D, V = config.dim, config.vocab_size
        self.embedding = parameter(rngs, (V, D), ('vocab', 'embed'), init.embedding)
        learned, positions = config.position == 'learned', (config.max_positions, D)
        self.position_embedding = parameter(rngs, positions, ('position', 'embed'), init.position) if learned else None
        self.embedding_norm = Norm(config, D, rngs=rngs) if config.embedding_norm else None
        self.blocks = _stacked(lambda rngs: Block(config, constrain=constrain, rngs=rngs), config.num_layers, rngs)
        self.final_norm = Norm(config, config.dim, rngs=rngs)
        untied = Linear((D,), (V,), in_axes=('embed',), out_axes=('vocab',), init=init.head, use_bias=False, rngs=rngs)
        self.head = None if config.tie_embeddings else untied
        self.config = config
        self.constrain = constrain

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        cache: Cache | None = None,
        length_B: jax.Array | None = None,
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
            length_B: tokens that each row has so far, where some of `positions_BT` are padding; see `rotary_angles`.
            dropout_key: None turns dropout off.
        """
        config = self.config
        B, T = tokens_BT.shape
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        x_BTD = self.embedding[...].astype(config.dtype)[tokens_BT]
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding[...].astype(config.dtype)[positions_BT]
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        embed_key, blocks_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x_BTD = drop(self.constrain(x_BTD, ACTIVATION_AXES), config.dropout, embed_key)

        context = Context(
            masks={window: _mask(T, segments_BT, positions_BT, cache, window) for window in set(layer_windows(config))},
            positions_BT=positions_BT,
            rotary=rotary_angles(positions_BT, config, length_B) if config.position == 'rotary' else None,
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
        if self.config.logit_softcap:
            # Gemma Team 2024, "Gemma 2".
            logits_BTV = self.config.logit_softcap * jnp.tanh(logits_BTV / self.config.logit_softcap)
        return self.constrain(logits_BTV, ('batch', 'length', 'vocab'))

    def _run_blocks(
        self, x_BTD: jax.Array, context: Context, cache: Cache | None, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Cache | None]:
        config, L = self.config, self.config.num_layers
        graph, blocks_L = nnx.split(self.blocks)
        keys_L = None if dropout_key is None else jax.random.split(dropout_key, L)
        inputs_L = (blocks_L, None if cache is None else LayerCache(*cache), keys_L)
        windows = layer_windows(config)

        def make_layer(window: int, in_loop: bool) -> Callable[[jax.Array, Any], tuple[jax.Array, LayerCache | None]]:
            def layer(x_BTD: jax.Array, inputs: Any) -> tuple[jax.Array, LayerCache | None]:
                block, cache, key = inputs
                return nnx.merge(graph, block)(x_BTD, context, window, cache, key)

            return rematerialize(layer, config.remat, in_loop=in_loop)

        def run_in_order(x_BTD: jax.Array, inputs: Any, windows: list[int], *, in_loop: bool) -> tuple[jax.Array, Any]:
            layers = {window: make_layer(window, in_loop) for window in set(windows)}
            caches = []
            for index, window in enumerate(windows):
                x_BTD, layer_cache = layers[window](x_BTD, jax.tree.map(lambda leaf, i=index: leaf[i], inputs))
                caches.append(layer_cache)
            return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)

        # The loop's body is one period of the attention pattern, since a kernel must know its window when it is
        # compiled; layers behind the last whole period follow it.
        period = len(config.attention_pattern) if config.scan_layers else L
        looped = L // period * period if period < L else 0
        caches = []
        if looped:
            inputs = jax.tree.map(lambda leaf: leaf[:looped].reshape(-1, period, *leaf.shape[1:]), inputs_L)
            run_period = partial(run_in_order, windows=windows[:period], in_loop=True)
            x_BTD, looped_caches = jax.lax.scan(run_period, x_BTD, inputs)
            caches.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), looped_caches))
        if looped < L:
            inputs = jax.tree.map(lambda leaf: leaf[looped:], inputs_L)
            x_BTD, last_caches = run_in_order(x_BTD, inputs, windows[looped:], in_loop=False)
            caches.append(last_caches)
        if cache is None:
            return x_BTD, None
        return x_BTD, Cache(*jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *caches))


def layer_windows(config: ModelConfig) -> list[int]:
    """For each layer the number of last tokens that it attends to; 0 for the whole context."""
    pattern = config.attention_pattern
    return [config.sliding_window if pattern[i % len(pattern)] == 'S' else 0 for i in range(config.num_layers)]


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


def _mask(
    length: int, segments_BT: jax.Array | None, positions_BT: jax.Array, cache: Cache | None, window: int
) -> jax.Array | None:
    """True where a query may look, [B, T, S]; None is causal within the window, which kernels know by themselves."""
    if cache is not None:
        assert segments_BT is None, 'a cached call has one document per row'
        return causal_mask(positions_BT, cache.key_LBSKH.shape[2], window)
    if segments_BT is None:
        return None
    same_document_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_document_BTS & causal_mask(jnp.arange(length)[None, :], length, window)


def _stacked(make: Callable[[nnx.Rngs], nnx.Module], num: int, rngs: nnx.Rngs) -> nnx.Module:
    """`num` modules as one, whose parameters have a leading `layers` axis."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), num)
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)

    def name_axis(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(axes=('layers', *variable.axes))

    state = jax.tree.map(name_axis, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graph, state)
