"""The loop over the decoder's blocks, and their rematerialization.

Shapes: B batch, T query length, S key length, D dim, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache as memoize
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlm.config.schema import ModelConfig
from maxlm.model.attention.chunked import ATTENDED
from maxlm.model.blocks import ACTIVATION_AXES, STACKS, Context, defers_additions
from maxlm.model.experts.router import RouterStats
from maxlm.model.fp8.products import SCALE
from maxlm.model.layers.kv_cache import Cache, LayerCache
from maxlm.model.layers.linear import FP8_KERNEL
from maxlm.model.layers.masks import layer_kinds, layer_windows, window_of
from maxlm.model.layers.weight_only_quantization import KERNEL
from maxlm.model.stream import Stream
from maxlm.model.value_embedding import ValueEmbeddings, value_layers
from maxlm.parallel.host_offload import fetch, on_host
from maxlm.parallel.partitioning import GATHERED, Partitioning

# Name of a layer's input for rematerialization policies.
LAYER_INPUT = 'layer_input'


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
            x_BTD, branch, caches = carry
            # Indexed inside of the rematerialized function: the loop saves its inputs for the backward pass anyway, but
            # would additionally save copies of slices.
            scales, block, slots, key, number, divisor = jax.tree.map(lambda leaf: leaf[index], inputs)
            block = fetch(block, slots)
            x_BTD = scales.mix(checkpoint_name(x_BTD, LAYER_INPUT), stream.input_BTD)
            layer_cache = None if caches is None else LayerCache([caches[window]], number)
            layer_context = context.for_layer(kind, divisor, jax.tree.map(lambda leaf: leaf[value_index], values))
            arguments = (layer_context, window, layer_cache, key)
            if defers:
                x_BTD, branch, cache, router = nnx.merge(graph, block).run(x_BTD, branch, *arguments)
            else:
                x_BTD, cache, router = nnx.merge(graph, block)(x_BTD, *arguments)
            return (x_BTD, branch, None if caches is None else {**caches, window: cache.blocks[0]}), router

        return rematerialize(layer, config.remat_policy, in_loop=in_loop, gathers=partitioning.num_shards('embed') > 1)

    def run_in_order(carry: Any, stacks: Any, layers: slice, *, in_loop: bool) -> tuple[Any, RouterStats | None]:
        routers, (x_BTD, branch, backout_BTD, caches) = [], carry
        inputs, values = (_in_order(stack, num, in_loop) for stack, num in zip(stacks, sizes(layers), strict=True))
        for kind, has_value in zip(kinds[layers], has_values[layers], strict=True):
            (own, index), (value, value_index) = next(inputs), next(values) if has_value else (None, 0)
            layer = make_layer(kind, index, value_index, in_loop)
            (x_BTD, branch, caches), router = layer((x_BTD, branch, caches), own, value)
            # Outside of the rematerialized function, which saves its inputs.
            backout_BTD = own[0].of_layer(index).keep(backout_BTD, x_BTD)
            routers.append(router)
        return (x_BTD, branch, backout_BTD, caches), jax.tree.map(lambda *layers: jnp.stack(layers), *routers)

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
    x_BTD, branch, backout_BTD, caches = carry
    if branch is not None:
        x_BTD = partitioning.constrain(branch.added_to(x_BTD), ACTIVATION_AXES)
    stream = stream._replace(x_BTD=x_BTD, backout_BTD=backout_BTD)
    return stream, caches, jax.tree.map(lambda *parts: jnp.concatenate(parts), *routers)


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

    @memoize
    def layer_of(graph: Any, window: int) -> Callable[..., tuple[jax.Array, list[Cache]]]:
        """Returns a function that is traced and lowered once for all layers of one kind; XLA inlines its calls."""

        @jax.jit
        def run_layer(
            x_BTD: jax.Array, context: Context, block: Any, parts: list[Cache]
        ) -> tuple[jax.Array, list[Cache]]:
            x_BTD, cache, _ = nnx.merge(graph, block)(x_BTD, context, window, LayerCache(parts, 0), None)
            return x_BTD, cache.blocks

        return run_layer

    updated, has_values = [], value_layers(config)
    layers = zip(graphs, layer_kinds(config), layer_windows(config), blocks, caches, strict=True)
    for index, (graph, kind, window, block, parts) in enumerate(layers):
        divisor = jnp.float32(index + 1) if config.attention_scale_by_layer else None
        number, values = sum(has_values[:index]), context.values if has_values[index] else None
        layer_context = context.for_layer(kind, divisor, jax.tree.map(lambda leaf, n=number: leaf[n], values))
        of_layer = stream.scales.of_layer(index)
        x_BTD = of_layer.mix(stream.x_BTD, stream.input_BTD)
        x_BTD, parts = layer_of(graph, window)(x_BTD, layer_context, block, parts)
        stream = stream._replace(x_BTD=x_BTD, backout_BTD=of_layer.keep(stream.backout_BTD, x_BTD))
        updated.append(parts)
    return stream, updated


def _values_of(
    values: ValueEmbeddings | None, config: ModelConfig, first_layer: jax.Array | int, num: int
) -> tuple[list[bool], ValueEmbeddings | None]:
    """Returns which of `num` layers have a value embedding, and these embeddings."""
    if values is None:
        return [False] * num, None
    has_values = value_layers(config)
    if not isinstance(first_layer, int):
        # A chunk of a pipeline has complete periods, which end at the last layer, and only its own embeddings.
        return has_values[-num:], values
    own, before = has_values[first_layer : first_layer + num], sum(has_values[:first_layer])
    return own, jax.tree.map(lambda leaf: leaf[before : before + sum(own)], values) if any(own) else None


def _in_order(stacked: Any, num: int, in_loop: bool) -> Iterator[tuple[Any, int]]:
    """Yields for each of `num` layers an array stacked over layers, and the layer's index in it."""
    parts = [stacked] * num if in_loop else _unstack(stacked, num)
    return zip(parts, range(num) if in_loop else [0] * num, strict=True)


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces each kernel that is stacked over layers by the list of its layers, [1, …]; see `run_layers`."""

    def unstack(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        is_kernel = path[0].key in STACKS and path[-1].key in (KERNEL, FP8_KERNEL)
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
