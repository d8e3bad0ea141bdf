"""How parameters start: three schemes, chosen by `model.init`."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.linear import Initializer

_normal, _zeros = jax.nn.initializers.normal, jax.nn.initializers.zeros


class Initializers(NamedTuple):
    """One for each role that a parameter can have; biases start at 0 and scales at 1 in all schemes."""

    embedding: Initializer
    position: Initializer
    # Projections that read the residual stream.
    projection: Initializer
    # Projections that write to it.
    residual: Initializer
    head: Initializer


def initializers(config: ModelConfig) -> Initializers:
    """The scheme of `model.init` for a resolved model.

    normal: Radford et al. 2019 (GPT-2) and its code: normal with init_std, 0.01 (half of its 0.02) for positions, and
        residual outputs smaller by sqrt(2 · num_layers), two of which each layer adds to the stream.
    small: Black et al. 2022 (GPT-NeoX-20B): sqrt(2 / (5 · dim)) of Nguyen & Salazar 2019, and 2 / (num_layers ·
        sqrt(dim)) of Wang & Komatsuzaki 2021 for residual outputs.
    uniform: Karpathy 2025 (nanochat): uniform with the deviation 1 / sqrt(dim), residual outputs 0, embeddings 1
        (init_std if tied), a head of 0.001 so that the first logits are near 0.
    """
    D, L = config.dim, config.num_layers
    if config.init == 'small':
        small = _normal(math.sqrt(2 / (5 * D)))
        return Initializers(small, small, small, _normal(2 / (L * math.sqrt(D))), small)
    if config.init == 'uniform':
        # A table that is the head too would give logits of sqrt(dim) at 1.
        embedding = _normal(config.init_std if config.tie_embeddings else 1.0)
        return Initializers(embedding, embedding, _symmetric_uniform(math.sqrt(3 / D)), _zeros, _normal(0.001))
    assert config.init == 'normal', config.init
    plain = _normal(config.init_std)
    return Initializers(plain, _normal(config.init_std / 2), plain, _normal(config.init_std / math.sqrt(2 * L)), plain)


def _symmetric_uniform(bound: float) -> Initializer:
    def init(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
