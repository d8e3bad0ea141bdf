"""Placement of optimizer state: each array belongs to the parameter whose path is part of its own path."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.parallel.host_offload import HOST
from maxlm.parallel.layout import SAVING, Layout
from maxlm.training.optimizers.quantized_moments import Blocks, place_moment
from maxlm.training.optimizers.user_optimizer import Parameter, check_optimizer, user_optimizer

# Logical axis that no mesh axis shards.
UNSHARDED = 'norm'


def place_state(state: Any, params: Any, shardings: Any, layout: Layout, *, on_host: bool = False) -> Any:
    """Returns the shapes, dtypes and shardings of optimizer state.

    Arrays with the shape of their parameter, and quantized moments, are sharded like the parameter. Arrays of other
    shapes have the axes of `state_axes`. Arrays that belong to no parameter are also sharded if they can be.

    Args:
        state: shapes and dtypes of the state.
        params: tree of the trainable parameters, see `Parameter`.
        shardings: their shardings in the layout of the state.
        layout: layout of the state.
        on_host: place the arrays of parameters in host memory.
    """
    described = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(shardings), strict=True)
    owners = {_keys(path): (param, sharding) for (path, param), sharding in described}

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        owner = owner_of(path, owners)
        param, sharding = owners[owner] if owner else (None, layout.named())
        if on_host and owner:
            sharding = sharding.with_memory_kind(HOST)
        if isinstance(leaf, Blocks):
            return place_moment(leaf, sharding)
        if param is None or leaf.shape != param.shape:
            axes = layout.spec(state_axes(leaf.shape, param, layout.num_shards))
            sharding = NamedSharding(layout.mesh, axes, memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, state, is_leaf=lambda node: isinstance(node, Blocks))


def owner_of(path: tuple[Any, ...], params: Collection[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Returns the path of the parameter to which an array of optimizer state belongs; None if it belongs to none.

    Args:
        path: path of the array, which contains that of its parameter: `.mu['blocks']['norm']['scale']`.
        params: paths of all trainable parameters.
    """
    keys = _keys(path)
    parts = (keys[start:stop] for start in range(len(keys)) for stop in range(len(keys), start, -1))
    return next((part for part in parts if part in params), None)


def state_axes(shape: Sequence[int], param: Parameter | None, num_shards: Callable[[str], int]) -> tuple[str, ...]:
    """Returns the logical axes of an array of optimizer state that has not the shape of its parameter.

    Each dimension has the axis of the parameter's next dimension of the same size, for example the rows or columns of
    a factored moment. If no dimension then saves memory, the largest other one is sharded like the model width.
    Dimensions that do not divide over their devices are not sharded.

    Args:
        shape: shape of the array.
        param: its parameter; None if it belongs to none.
        num_shards: number of devices of each logical axis.
    """
    rest = list(zip(param.shape, param.axes, strict=True)) if param else []
    axes = []
    for size in shape:
        found = next((index for index, (other, _) in enumerate(rest) if other == size), None)
        axis = UNSHARDED if found is None else rest[found][1]
        axes.append(axis if size % num_shards(axis) == 0 else UNSHARDED)
        rest = rest if found is None else rest[found + 1 :]
    if not SAVING & {*axes}:
        saving = 'expert_embed' if 'experts' in axes else 'embed'
        free = [i for i, size in enumerate(shape) if axes[i] == UNSHARDED and size % num_shards(saving) == 0]
        if free:
            axes[max(free, key=lambda i: shape[i])] = saving
    return tuple(axes)


@functools.lru_cache(maxsize=64)
def user_state_arrays(config: OptimizerConfig, params: tuple[Parameter, ...]) -> dict[str, list[Any]]:
    """Returns shapes and dtypes of the state of an optimizer of the user, by the name of their parameter or ''.

    Args:
        config: section `optimizer` of the config.
        params: the trainable parameters.
    """
    tree: dict[str, Any] = {}
    for param in params:
        *modules, name = param.name.split('.')
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = param
    optimizer = user_optimizer(config, optax.constant_schedule(config.learning_rate), tree)
    abstract = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, param.dtype), tree)
    state = check_optimizer(optimizer, abstract, name=config.name)
    names, arrays = {tuple(param.name.split('.')) for param in params}, defaultdict(list)
    for path, leaf in jax.tree.leaves_with_path(state):
        arrays['.'.join(owner_of(path, names) or ())].append(leaf)
    return arrays


def _keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(entry, 'key', None) for entry in path)
