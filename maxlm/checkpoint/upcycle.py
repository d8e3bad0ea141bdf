"""Initializes a model with experts from a dense checkpoint (Komatsuzaki et al. 2023, "Sparse Upcycling").

Each expert is a copy of the feed-forward of its layer with noise, and the router is initialized randomly. If the scores
of the selected experts are normalized, the model initially computes nearly the same as the dense model.

Shapes: L layers, E experts, k first dense layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.checkpoint.item_metadata import named_leaves
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.families import is_of_experts
from maxlm.errors import InputError
from maxlm.model.blocks import BLOCKS, DENSE_BLOCKS
from maxlm.model.experts.router import ROUTER
from maxlm.training.state import Params

_EXPERTS = 'feedforward.experts.'


def is_upcycled(has: Mapping[str, Any], model: ModelConfig) -> bool:
    """Returns True if a checkpoint with these parameters is dense and the model has experts."""
    return model.num_experts > 0 and not any(map(is_of_experts, has))


def check_upcycling(path: Any, has: Mapping[str, Any], config: Config) -> None:
    """Checks that the experts can be copies of the feed-forward of a dense checkpoint.

    Raises:
        InputError: they cannot. The message names the keys.
    """
    model = config.model
    if model.num_shared_experts:
        raise InputError(
            f'{path}: the checkpoint is dense, so it has no shared experts; set model.num_shared_experts=0 instead of '
            f'{model.num_shared_experts}'
        )
    up = has.get(f'{BLOCKS}.feedforward.up.kernel')
    if up is not None and up.shape[-1] != model.expert_ffn_dim:
        raise InputError(
            f'{path}: the feed-forward of the dense checkpoint has width {up.shape[-1]}, but '
            f'model.expert_ffn_dim={model.expert_ffn_dim}; set it to {up.shape[-1]}'
        )


def dense_source(name: str) -> str:
    """Returns the path of the dense parameter from which a parameter of a model with experts is computed."""
    if is_of_experts(name):
        return name.replace(_EXPERTS, 'feedforward.')
    return name.replace(f'{DENSE_BLOCKS}.', f'{BLOCKS}.', 1) if name.startswith(f'{DENSE_BLOCKS}.') else name


def dense_parameters(abstract: Params, model: ModelConfig) -> Params:
    """Returns shapes, dtypes and shardings of the dense model from those of the model with experts."""
    tree: dict[str, Any] = {}
    for name, leaf in named_leaves(abstract).items():
        if ROUTER in name.split('.') or name.startswith(f'{DENSE_BLOCKS}.'):
            continue
        if name.startswith(f'{BLOCKS}.'):
            removed = 2 if is_of_experts(name) else 1
            spec = leaf.sharding.spec[removed:]
            # The number of layers of the dense model may not divide over the stages of a pipeline.
            sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *spec), memory_kind='device')
            leaf = jax.ShapeDtypeStruct((model.num_layers, *leaf.shape[removed:]), leaf.dtype, sharding=sharding)
        *modules, last = dense_source(name).split('.')
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[last] = leaf
    return tree


def upcycle(name: str, dense: jax.Array, target: jax.ShapeDtypeStruct, config: Config) -> jax.Array:
    """Returns a parameter of the layers of a model with experts.

    Args:
        name: dotted path of the parameter.
        dense: parameter `dense_source(name)` of the dense model, [L, …].
        target: shape and sharding of the result, [k, …], [L - k, …] or [L - k, E, …].
        config: resolved config of the run.
    """
    k = config.model.num_dense_layers
    # Processes of a run must draw the same noise.
    key = jax.random.fold_in(jax.random.key(config.train.seed), zlib.crc32(name.encode()))

    def convert(dense_L: jax.Array) -> jax.Array:
        if name.startswith(f'{DENSE_BLOCKS}.'):
            return dense_L[:k]
        if not is_of_experts(name):
            return dense_L[k:]
        copies_LE = jnp.broadcast_to(dense_L[k:, None], target.shape)
        noise_LE = jax.random.normal(key, target.shape, dense_L.dtype) * dense_L.std()
        return copies_LE + config.train.upcycling_noise * noise_LE

    result: jax.Array = jax.jit(convert, out_shardings=target.sharding)(dense)
    return result
