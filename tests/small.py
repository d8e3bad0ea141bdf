"""Small models and batches that tests share."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from maxlm.config.loading import build, default
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config, ModelConfig
from maxlm.parallel.layout import Layout, make_layout
from maxlm.training.state import TrainState, abstract_state

VOCAB = 61
# Settings of latent attention with four heads of 16 dims; no two sizes are equal.
LATENT = {
    'model__family': 'llama',
    'model__kv_lora_rank': 24,
    'model__qk_nope_head_dim': 10,
    'model__qk_rope_head_dim': 6,
    'model__v_head_dim': 12,
}
# Options of the residual stream for models of two layers or more.
STREAM = {
    'model__residual_scale': True,
    'model__embedding_residual': True,
    'model__smear_channels': 5,
    'model__backout_layer': 1,
}
# Three layers: one dense layer and two with experts.
EXPERTS = {
    'model__family': 'llama',
    'model__num_layers': 3,
    'model__num_dense_layers': 1,
    'model__num_experts': 4,
    'model__num_experts_per_token': 2,
    'model__expert_ffn_dim': 16,
    'model__num_shared_experts': 1,
}


def model_keys(**settings: Any) -> dict[str, Any]:
    """Returns overrides of `small_config` for keys of the model: `model_keys(dim=16)` is {'model__dim': 16}."""
    return {f'model__{key}': value for key, value in settings.items()}


def build_config(**settings: Any) -> Config:
    """Returns an unresolved config with settings of the form `model__dim=16`."""
    values = default()
    for key, value in settings.items():
        section, name = key.split('__')
        values[section][name] = value
    return build(values)


def small_config(num_devices: int = 1, *, teacher: ModelConfig | None = None, **overrides: Any) -> Config:
    """Returns a resolved config of a two-layer model; overrides have the form `model__dim=16`.

    `teacher` is the model of `distill.teacher`.
    """
    settings = {
        'model__num_layers': 2,
        'model__dim': 32,
        'model__num_heads': 4,
        'model__dtype': 'float32',
        'data__seq_len': 16,
        'train__num_steps': 20,
        'train__global_batch_size': 8,
        'optimizer__learning_rate': 1e-2,
        'optimizer__warmup_steps': 2,
        **({} if teacher is None else {'distill__teacher': 'runs/teacher'}),
        **overrides,
    }
    config = dataclasses.replace(build_config(**settings), teacher=teacher)
    return resolve(config, platform='cpu', num_devices=num_devices, vocab_size=VOCAB, windows=100)


def small_layout(config: Config) -> Layout:
    """Returns the layout of the config's mesh over the first virtual devices."""
    return make_layout(config.mesh, jax.devices()[: math.prod(config.mesh.sizes.values())])


def small_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tokens with two or three documents per row and some padding, like the data pipeline."""
    rng = np.random.default_rng(seed)
    B, T = config.train.global_batch_size, config.data.seq_len
    tokens = rng.integers(0, VOCAB, (B, T), dtype=np.int32)
    targets = rng.integers(0, VOCAB, (B, T), dtype=np.int32)
    segments = np.ones((B, T), np.int32)
    positions = np.zeros((B, T), np.int32)
    weights = np.ones((B, T), np.float32)
    for row in range(B):
        cuts = sorted(rng.choice(np.arange(2, T - 1), size=2, replace=False))
        bounds = [0, *cuts, T]
        for number, (start, stop) in enumerate(itertools.pairwise(bounds), start=1):
            segments[row, start:stop] = number
            positions[row, start:stop] = np.arange(stop - start)
            weights[row, stop - 1] = 0
        if row % 3 == 0:
            # Replaces the last document of some rows by padding, so that rows have different numbers of targets.
            segments[row, cuts[1] :] = 0
            weights[row, cuts[1] :] = 0
    return {'tokens': tokens, 'targets': targets, 'weights': weights, 'segments': segments, 'positions': positions}


def small_state(config: Config, layout: Layout, seed: int = 0) -> TrainState:
    """Returns the initial state with parameters from NumPy; unlike `init_state`, it compiles nothing."""
    rng = np.random.default_rng(seed)

    def initial(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        if name == 'scale':
            return np.ones(leaf.shape, leaf.dtype)
        if name in ('bias', 'lora_b'):
            return np.zeros(leaf.shape, leaf.dtype)
        return rng.normal(0, 0.02, leaf.shape).astype(leaf.dtype)

    abstract = abstract_state(config, layout)
    params = jax.tree_util.tree_map_with_path(initial, abstract.params)
    values = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    values = values._replace(params=params)
    if abstract.ema is not None:
        values = values._replace(ema=jax.tree.map(np.copy, params))
    if abstract.reference is not None:
        cast = jax.tree.map(lambda value, leaf: value.astype(leaf.dtype), params, abstract.reference)
        values = values._replace(reference=cast)
    if abstract.loss_scale is not None:
        scale = values.loss_scale._replace(scale=np.float32(config.train.initial_loss_scale))
        values = values._replace(loss_scale=scale)
    return jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), values, abstract)
