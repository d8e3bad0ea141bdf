"""Decoders with random parameters from NumPy, because JAX's random initializers take seconds to compile."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from maxlm.config.schema import Config, ModelConfig
from maxlm.model.decoder import Decoder
from maxlm.parallel.host_offload import HOST
from maxlm.parallel.layout import Layout
from maxlm.training.state import TrainState, abstract_state, param_shardings

Params = dict[str, Any]


def decoder_graph(config: ModelConfig) -> Any:
    """Returns a decoder without its parameters, for `nnx.merge`."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]


def logits(graph: Any, params: Params, tokens_BT: Any, **kwargs: Any) -> jax.Array:
    """Returns the logits of a decoder; to be traced by the caller."""
    model = nnx.merge(graph, params)
    hidden_BTD, _, _ = model(tokens_BT, **kwargs)
    return model.logits(hidden_BTD)


def abstract_params(config: Config) -> Params:
    """Returns the shapes of the parameters as a nested dict."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0)))))


def random_params(config: Config, layout: Layout | None = None, *, std: float = 0.2, seed: int = 1) -> Params:
    """Returns random parameters, including biases and scales, so that none hides a bug.

    With a layout the arrays are on its devices, otherwise they are NumPy arrays. Values do not depend on the layout.
    """
    rng = np.random.default_rng(seed)

    def sample(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        center = 1 if path[-1].key in ('scale', 'residual_scales', 'smear_scale') else 0
        return (center + std * rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)

    params: Params = jax.tree_util.tree_map_with_path(sample, abstract_params(config))
    if layout is None:
        return params
    memory = HOST if config.mesh.host_offload == 'all' else 'device'
    shardings = jax.tree.map(lambda sharding: sharding.with_memory_kind(memory), param_shardings(config, layout))
    return jax.device_put(params, shardings)


def first_state(config: Config, layout: Layout, **kwargs: Any) -> TrainState:
    """Returns the initial state with random parameters; moments and counts are 0."""
    shapes = abstract_state(config, layout)
    assert shapes.ema is shapes.loss_scale is shapes.reference is None, 'these do not begin with zeros'
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), shapes)
    return state._replace(params=random_params(config, layout, **kwargs))
