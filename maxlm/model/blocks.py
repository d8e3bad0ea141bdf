"""The decoder's blocks, the loop over them, and their rematerialization.

Shapes: B batch, T query length, S key length, D dim, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlm.config.schema import ModelConfig
from maxlm.config.user_function import load_function
from maxlm.errors import InputError
from maxlm.model.attention.attention import Attention
from maxlm.model.attention.chunked import ATTENDED
from maxlm.model.attention.latent import LatentAttention
from maxlm.model.attention.tree import TokenTree
from maxlm.model.experts.expert_linear import ExpertLinear
from maxlm.model.experts.mixture_of_experts import MixtureOfExperts
from maxlm.model.experts.router import RouterStats
from maxlm.model.layers.fp8 import SCALE
from maxlm.model.layers.kv_cache import Cache, CacheIndices, LayerCache
from maxlm.model.layers.linear import Linear
from maxlm.model.layers.masks import layer_kinds, layer_windows, window_of
from maxlm.model.layers.mlp import FeedForward
from maxlm.model.layers.norm import Norm
from maxlm.model.layers.rope import Rotary
from maxlm.model.layers.value_embedding import ValueEmbeddings, value_embedding, value_layers
from maxlm.model.layers.weight_only_quantization import KERNEL, weights_of
from maxlm.model.stream import Stream
from maxlm.parallel.host_offload import fetch, on_host
from maxlm.parallel.partitioning import GATHERED, Partitioning

# Names of the decoder's attributes with the blocks, which are part of the path of every parameter stacked over layers:
# all blocks, except the first blocks of a model with experts that are dense.
BLOCKS, DENSE_BLOCKS = 'blocks', 'dense_blocks'
# In the order of the layers.
STACKS = (DENSE_BLOCKS, BLOCKS)
# Name of a layer's input for rematerialization policies.
LAYER_INPUT = 'layer_input'
ACTIVATION_AXES = ('batch', 'length', 'activation')


def is_stacked(path: str) -> bool:
    """Returns True if the parameter with this dotted path is stacked over layers."""
    return path.partition('.')[0] in STACKS


class Context(NamedTuple):
    """Arguments of a call that all blocks share; see `Attention`.

    Attributes:
        masks: attention mask [B, T, S] or None, by window of the layer.
        segments_BT: index of the document of each token, or None.
        tree: token trees of the rows, or None.
        cache_indices: slots of this call's keys and values in the cache, by window of the layer.
        rotary: angles of the positions; None without rotary embedding.
        local_rotary: angles for the layers with a sliding window.
        score_divisor: additional divisor of the attention scores, a float32 scalar; None: 1.
        tokens_BT: token ids, for value embeddings.
        values: value embeddings of the model, or of the layer in the context of a layer; None without them.
    """

    masks: dict[int, jax.Array | None]
    segments_BT: jax.Array | None
    tree: TokenTree | None
    cache_indices: dict[int, CacheIndices | None]
    rotary: Rotary | None
    local_rotary: Rotary | None
    score_divisor: jax.Array | None = None
    tokens_BT: jax.Array | None = None
    values: ValueEmbeddings | None = None

    def for_layer(
        self, kind: str, score_divisor: jax.Array | None = None, values: ValueEmbeddings | None = None
    ) -> Context:
        """Returns the context of a layer, whose kind is its letter in `model.attention_pattern`."""
        rotary = {'L': self.rotary, 'S': self.local_rotary, 'N': None}[kind]
        return self._replace(rotary=rotary, score_divisor=score_divisor, values=values)

    def added_values(self, x_BTD: jax.Array, num_heads: int, partitioning: Partitioning) -> jax.Array | None:
        """Returns `value_embedding` of a layer with the input `x_BTD` of attention; None if the layer has none."""
        if self.values is None:
            return None
        assert self.tokens_BT is not None, 'value embeddings need the token ids'
        return value_embedding(self.values, x_BTD, self.tokens_BT, num_heads, partitioning)


class Block(nnx.Module):
    """Residual block of attention and feed-forward, which run in parallel with `model.parallel_residual`.

    `model.norm_placement` selects norms of the input of each branch, of its output, or both. With `model.num_experts`,
    the feed-forward is a `MixtureOfExperts`.
    """

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        pre, post = config.norm_placement != 'post', config.norm_placement != 'pre'

        def norm() -> Norm:
            return Norm(config, config.dim, rngs=rngs, partitioning=partitioning)

        self.attention_norm = norm() if pre else None
        make_attention = LatentAttention if config.kv_lora_rank else Attention
        self.attention = make_attention(config, partitioning=partitioning, rngs=rngs)
        self.attention_post_norm = norm() if post else None
        self.feedforward_norm = norm() if pre else None
        make_feedforward = MixtureOfExperts if config.num_experts else FeedForward
        self.feedforward = make_feedforward(config, partitioning=partitioning, rngs=rngs)
        self.feedforward_post_norm = norm() if post else None
        self.parallel_residual = config.parallel_residual
        self.has_norm_kernels = config.norm_kernel == 'pallas'
        self.residual_multiplier = config.residual_multiplier
        self.num_kv_heads = config.num_kv_heads
        self.dropout = config.dropout
        self.partitioning = partitioning
        weights = weights_of(config)
        if weights is not None:
            for _, module in list(nnx.iter_modules(self)):
                if isinstance(module, (Linear, ExpertLinear)):
                    module.quantize_kernel(weights)

    def __call__(
        self, x_BTD: jax.Array, context: Context, window: int, cache: LayerCache | None, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LayerCache | None, RouterStats | None]:
        """Returns the stream [B, T, D], the updated cache, and the statistics of the router of a layer with experts.

        `window` is the number of last tokens to which a query attends; 0 means all.
        """
        stream_BTD, branch_BTD, new_cache, router = self.run(x_BTD, None, context, window, cache, dropout_key)
        return self.partitioning.constrain(stream_BTD + branch_BTD, ACTIVATION_AXES), new_cache, router

    def run(
        self,
        stream_BTD: jax.Array,
        branch_BTD: jax.Array | None,
        context: Context,
        window: int,
        cache: LayerCache | None,
        dropout_key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, LayerCache | None, RouterStats | None]:
        """Runs the block without its last addition, which the kernel of the next norm can perform.

        Args:
            stream_BTD: stream of the previous block.
            branch_BTD: branch that the previous block has not added to it; None if it has.
            context, window, cache, dropout_key: see `__call__`.

        Returns:
            The stream and the branch that is to be added to it, the updated cache, and the statistics of the router.
        """
        attention_key, feedforward_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x_BTD, normed_BTD = _add_and_normalize(self.attention_norm, stream_BTD, branch_BTD)
        with jax.named_scope('attention'):
            attended_BTD, new_cache = self.attention(
                normed_BTD,
                mask_BTS=context.masks[window],
                segments_BT=context.segments_BT,
                tree=context.tree,
                cache_indices=context.cache_indices[window],
                rotary=context.rotary,
                score_divisor=context.score_divisor,
                added_v_BTKH=context.added_values(normed_BTD, self.num_kv_heads, self.partitioning),
                window=window,
                cache=cache,
            )
        attended_BTD = self._branch(attended_BTD, self.attention_post_norm, attention_key)
        added_BTD, router = None if self.parallel_residual else attended_BTD, None
        stream_BTD, fed_BTD = _add_and_normalize(self.feedforward_norm, x_BTD, added_BTD)
        if isinstance(self.feedforward, MixtureOfExperts):
            # With a cache, the capacity of experts would depend on the number of tokens in a call.
            fed_BTD, router = self.feedforward(fed_BTD, context.segments_BT, is_dropless=cache is not None)
        else:
            fed_BTD = self.feedforward(fed_BTD)
        fed_BTD = self._branch(fed_BTD, self.feedforward_post_norm, feedforward_key)
        if self.parallel_residual and self.has_norm_kernels:
            # The sum of both branches needs no copy of the stream.
            fed_BTD = attended_BTD + fed_BTD
        elif self.parallel_residual:
            stream_BTD = stream_BTD + attended_BTD
        return stream_BTD, fed_BTD, new_cache, router

    def _branch(self, x_BTD: jax.Array, norm: Norm | None, dropout_key: jax.Array | None) -> jax.Array:
        """Returns what a branch with the output `x_BTD` adds to the stream."""
        x_BTD = x_BTD if norm is None else norm(x_BTD)
        x_BTD = x_BTD if self.residual_multiplier == 1 else x_BTD * self.residual_multiplier
        return dropout(x_BTD, self.dropout, dropout_key)


def _add_and_normalize(
    norm: Norm | None, stream_BTD: jax.Array, branch_BTD: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum and the normalized sum; without a norm, the sum twice."""
    if norm is not None:
        return norm.add_and_normalize(stream_BTD, branch_BTD)
    stream_BTD = stream_BTD if branch_BTD is None else stream_BTD + branch_BTD
    return stream_BTD, stream_BTD


def block_class(config: ModelConfig) -> type[Block]:
    """Returns the class of the blocks: `Block`, or the class that `model.block` names.

    Raises:
        InputError: the class cannot be imported, does not accept the arguments of `Block`, or is not a subclass of it.
    """
    if not config.block:
        return Block
    found: Any = load_function(
        config.block, kind='model.block', arguments=('config',), keywords=('partitioning', 'rngs')
    )
    if not (isinstance(found, type) and issubclass(found, Block)):
        raise InputError(f'model.block={config.block}: must be a subclass of maxlm.model.blocks.Block')
    return found


def stack_modules(make: Callable[[nnx.Rngs], nnx.Module], num: int, rngs: nnx.Rngs, axis: str) -> nnx.Module:
    """Returns one module for `num` modules; its parameters have a leading axis with the logical name `axis`."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), num)
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)

    def name_axis(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(axes=(axis, *variable.axes))

    state = jax.tree.map(name_axis, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graph, state)


def run_layers(
    graph: Any,
    config: ModelConfig,
    partitioning: Partitioning,
    kinds: str,
    stream: Stream,
    context: Context,
    inputs_L: Any,
    caches: dict[int, Cache] | None = None,
    first_layers: Mapping[int, int] | None = None,
    first_layer: jax.Array | int = 0,
) -> tuple[Stream, dict[int, Cache] | None, RouterStats | None]:
    """Runs consecutive layers in order.

    Args:
        graph: NNX graph of a `Block`.
        config: config of the model.
        partitioning: partitioning of the model.
        kinds: letter of each layer in the attention pattern, starting at the first letter of the pattern. The last
            period of the pattern may be incomplete.
        stream: input stream.
        context: arguments that the layers share.
        inputs_L: (blocks, slots or None, dropout keys or None), stacked over the layers. Without a loop over the
            layers, an array can be replaced by the list of its layers, [1, …].
        caches: caches of all layers by window.
        first_layers: index of the first of these layers in the cache of each window; None: 0.
        first_layer: index of the first of these layers in the model. If it is traced, they are a chunk of a pipeline.

    Returns:
        The stream, the updated caches, and the statistics of the routers, stacked over the layers.
    """
    L = len(kinds)
    windows = [window_of(kind, config) for kind in kinds]
    # Index of each layer in the cache of its window.
    firsts = first_layers or {}
    numbers = [firsts.get(window, 0) + windows[:index].count(window) for index, window in enumerate(windows)]
    divisors_L = first_layer + jnp.arange(1.0, L + 1) if config.attention_scale_by_layer else None
    defers, scales_L = defers_additions(config), stream.scales.of_layers(first_layer, L)
    inputs_L = (scales_L, *inputs_L, None if caches is None else jnp.array(numbers), divisors_L)
    has_values, values = _values_of(context.values, config, first_layer, L)

    def make_layer(kind: str, index: int, value_index: int, in_loop: bool) -> Callable[[Any, Any, Any], Any]:
        window = window_of(kind, config)

        def layer(carry: Any, inputs: Any, values: Any) -> tuple[Any, RouterStats | None]:
            x_BTD, branch_BTD, caches = carry
            # Indexed inside of the rematerialized function: the loop saves its inputs for the backward pass anyway, but
            # would additionally save copies of slices.
            scales, block, slots, key, number, divisor = jax.tree.map(lambda leaf: leaf[index], inputs)
            block = fetch(block, slots)
            x_BTD = scales.mix(checkpoint_name(x_BTD, LAYER_INPUT), stream.input_BTD)
            layer_cache = None if caches is None else LayerCache([caches[window]], number)
            layer_context = context.for_layer(kind, divisor, jax.tree.map(lambda leaf: leaf[value_index], values))
            arguments = (layer_context, window, layer_cache, key)
            if defers:
                x_BTD, branch_BTD, cache, router = nnx.merge(graph, block).run(x_BTD, branch_BTD, *arguments)
            else:
                x_BTD, cache, router = nnx.merge(graph, block)(x_BTD, *arguments)
            return (x_BTD, branch_BTD, None if caches is None else {**caches, window: cache.blocks[0]}), router

        return rematerialize(layer, config.remat_policy, in_loop=in_loop, gathers=partitioning.num_shards('embed') > 1)

    def run_in_order(carry: Any, stacks: Any, layers: slice, *, in_loop: bool) -> tuple[Any, RouterStats | None]:
        routers, (x_BTD, branch_BTD, backout_BTD, caches) = [], carry
        inputs, values = (_in_order(stack, num, in_loop) for stack, num in zip(stacks, sizes(layers), strict=True))
        for kind, has_value in zip(kinds[layers], has_values[layers], strict=True):
            (own, index), (value, value_index) = next(inputs), next(values) if has_value else (None, 0)
            layer = make_layer(kind, index, value_index, in_loop)
            (x_BTD, branch_BTD, caches), router = layer((x_BTD, branch_BTD, caches), own, value)
            # Outside of the rematerialized function, which saves its inputs.
            backout_BTD = own[0].of_layer(index).keep(backout_BTD, x_BTD)
            routers.append(router)
        return (x_BTD, branch_BTD, backout_BTD, caches), jax.tree.map(lambda *layers: jnp.stack(layers), *routers)

    def sizes(layers: slice) -> tuple[int, int]:
        return len(kinds[layers]), sum(has_values[layers])

    # The loop body is one period of the patterns of layers, because the window of a kernel must be known at compile
    # time. Layers after the last complete period follow the loop.
    period = config.layer_period if config.scan_layers else L
    looped = L // period * period if period < L else 0
    carry, routers, stacks = (stream.x_BTD, None, stream.backout_BTD, caches), [], (inputs_L, values)
    if looped:
        within, per_body = sizes(slice(0, looped)), sizes(slice(0, period))
        parts = [
            jax.tree.map(lambda leaf, end=end, num=num: leaf[:end].reshape(-1, num, *leaf.shape[1:]), stack)
            for stack, end, num in zip(stacks, within, per_body, strict=True)
        ]
        run_period = partial(run_in_order, layers=slice(0, period), in_loop=True)
        carry, router = jax.lax.scan(run_period, carry, parts)
        routers.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), router))
    if looped < L:
        starts = sizes(slice(0, looped))
        parts = [
            jax.tree.map(lambda leaf, start=start: leaf[start:], stack)
            for stack, start in zip(stacks, starts, strict=True)
        ]
        carry, router = run_in_order(carry, parts, slice(looped, L), in_loop=False)
        routers.append(router)
    x_BTD, branch_BTD, backout_BTD, caches = carry
    if branch_BTD is not None:
        x_BTD = partitioning.constrain(x_BTD + branch_BTD, ACTIVATION_AXES)
    stream = stream._replace(x_BTD=x_BTD, backout_BTD=backout_BTD)
    return stream, caches, jax.tree.map(lambda *parts: jnp.concatenate(parts), *routers)


def defers_additions(config: ModelConfig) -> bool:
    """Returns True if the first norm of a block adds the last branch of the block before it to the stream.

    Loops and rematerialization would save the branch in addition to the stream. Options of the stream need it complete.
    """
    is_kept = not config.scan_layers and config.remat_policy == 'none'
    needs_stream = config.residual_scale or config.embedding_residual or config.backout_layer >= 0
    return (
        config.norm_kernel == 'pallas'
        and config.norm_placement != 'post'
        and is_kept
        and not (config.block or needs_stream)
    )


def run_layers_unrolled(
    graphs: Sequence[Any],
    config: ModelConfig,
    stream: Stream,
    context: Context,
    blocks: Sequence[Any],
    caches: Sequence[list[Cache]],
) -> tuple[Stream, list[list[Cache]]]:
    """Runs all layers with separate arrays for the parameters and cache of each layer.

    For one token, slicing a stack would cost more than the computation. The arguments and the result are those of
    `run_layers`, as lists over layers, without statistics.
    """
    updated, has_values = [], value_layers(config)
    layers = zip(graphs, layer_kinds(config), layer_windows(config), blocks, caches, strict=True)
    for index, (graph, kind, window, block, parts) in enumerate(layers):
        divisor = jnp.float32(index + 1) if config.attention_scale_by_layer else None
        number, values = sum(has_values[:index]), context.values if has_values[index] else None
        layer_context = context.for_layer(kind, divisor, jax.tree.map(lambda leaf, n=number: leaf[n], values))
        of_layer = stream.scales.of_layer(index)
        x_BTD = of_layer.mix(stream.x_BTD, stream.input_BTD)
        x_BTD, cache, _ = nnx.merge(graph, block)(x_BTD, layer_context, window, LayerCache(parts, 0), None)
        stream = stream._replace(x_BTD=x_BTD, backout_BTD=of_layer.keep(stream.backout_BTD, x_BTD))
        updated.append(cache.blocks)
    return stream, updated


def _values_of(
    values: ValueEmbeddings | None, config: ModelConfig, first_layer: jax.Array | int, num: int
) -> tuple[list[bool], ValueEmbeddings | None]:
    """Returns which of `num` layers have a value embedding, and these embeddings."""
    if values is None:
        return [False] * num, None
    has_values = value_layers(config)
    if not isinstance(first_layer, int):
        # A chunk of a pipeline has complete periods, and its context has only its own embeddings.
        return has_values[:num], values
    own, before = has_values[first_layer : first_layer + num], sum(has_values[:first_layer])
    return own, jax.tree.map(lambda leaf: leaf[before : before + sum(own)], values) if any(own) else None


def _in_order(stacked: Any, num: int, in_loop: bool) -> Iterator[tuple[Any, int]]:
    """Yields for each of `num` layers an array stacked over layers, and the layer's index in it."""
    parts = [stacked] * num if in_loop else _unstack(stacked, num)
    return zip(parts, range(num) if in_loop else [0] * num, strict=True)


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces each kernel that is stacked over layers by the list of its layers, [1, …]; see `run_layers`."""

    def unstack(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        is_kernel = path[0].key in STACKS and path[-1].key == KERNEL
        return list(jax.lax.split(leaf, [1] * len(leaf))) if is_kernel else leaf

    unstacked: dict[str, Any] = jax.tree_util.tree_map_with_path(unstack, params)
    return unstacked


def stack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the lists of `unstack_layers`."""
    return jax.tree.map(lambda leaf: jnp.concatenate(leaf) if _is_list(leaf) else leaf, dict(params), is_leaf=_is_list)


def _is_list(leaf: Any) -> bool:
    return isinstance(leaf, list)


def _unstack(stacked: Any, num: int) -> list[Any]:
    """Splits a tree with leaves [num, …], or lists of `num` arrays, into `num` trees with leaves [1, …]."""

    def split(leaf: Any) -> Any:
        if _is_list(leaf):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not on_host(leaf):
            # The gradient of a split is one concatenation; the gradient of slices is a sum of `num` padded stacks.
            return jax.lax.split(leaf, [1] * num)
        return [leaf[index : index + 1] for index in range(num)]

    leaves, tree = jax.tree.flatten(stacked, is_leaf=_is_list)
    return [jax.tree.unflatten(tree, parts) for parts in zip(*map(split, leaves), strict=True)]


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Applies inverted dropout (Srivastava et al. 2014); returns x unchanged without a key or if the rate is 0."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def rematerialize(layer: Callable, policy: str, *, in_loop: bool, gathers: bool = False) -> Callable:
    """Wraps a layer so that its backward pass recomputes the values that `model.remat_policy` does not save.

    If a layer `gathers` its parameters, the backward pass gathers them again. Saving them would keep the gathered
    parameters of all layers in memory.
    """
    if policy == 'none' and not gathers:
        return layer
    policies = jax.checkpoint_policies

    def keep_attention(primitive: Any, *_: Any, **parameters: Any) -> bool:
        # Recomputing the statistics means running attention twice. Outputs of cuDNN's forward pass have no name.
        return 'dot_product_attention_fwd' in primitive.name or parameters.get('name') in (SCALE, ATTENDED)

    keep = {
        'none': policies.save_anything_except_these_names(GATHERED),
        'dots': policies.save_from_both_policies(policies.dots_saveable, keep_attention),
        'dots_no_batch': policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, keep_attention),
        'full': policies.save_only_these_names(SCALE),
        'offload': policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[SCALE],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src='device',
            offload_dst='pinned_host',
        ),
    }[policy]
    # A loop already prevents XLA from merging both computations, so the barrier of `prevent_cse` is not needed.
    return jax.checkpoint(layer, policy=keep, prevent_cse=not in_loop)
