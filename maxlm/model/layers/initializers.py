"""Parameter initializers: four schemes, selected by `model.init`."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.linear import Initializer
from maxlm.model.layers.transfer import transfer_of

_normal, _zeros = jax.nn.initializers.normal, jax.nn.initializers.zeros


class Initializers(NamedTuple):
    """Initializers of a scheme by role of the parameter. Biases start at 0 and scales at 1 in all schemes.

    Attributes:
        embedding: token embedding.
        position: position embedding.
        projection: projections that read the residual stream, except those of the feed-forward.
        feedforward: projections of the feed-forward that read the residual stream.
        residual: projections that write to the residual stream.
        head: output head.
    """

    embedding: Initializer
    position: Initializer
    projection: Initializer
    feedforward: Initializer
    residual: Initializer
    head: Initializer


def initializers(config: ModelConfig) -> Initializers:
    """Returns the scheme `model.init` of a resolved model.

    normal: Radford et al. 2019 (GPT-2) and its code. Normal distribution with standard deviation init_std, and
        init_std / 2 for positions (0.01 in GPT-2). Residual outputs are divided by sqrt(2 · num_layers), because each
        layer adds two of them to the stream.
    small: Black et al. 2022 (GPT-NeoX-20B). Normal distribution with standard deviation sqrt(2 / (5 · dim)) of Nguyen &
        Salazar 2019, and 2 / (num_layers · sqrt(dim)) of Wang & Komatsuzaki 2021 for residual outputs.
    uniform: Karpathy 2025 (nanochat). Uniform distribution with standard deviation 1 / sqrt(dim), and 0 for residual
        outputs. Embeddings are normal with standard deviation 1 (init_std if tied). The head is normal with 0.001, so
        the first logits are near 0.
    uniform_2026: Karpathy 2026 (nanochat, January 2026 and later). As uniform, with a standard deviation of 0.8 for
        embeddings, and of 0.4 / sqrt(dim) for the projections of the feed-forward that read the stream.

    With `model.base_dim` and `model.base_num_layers`, the standard deviations are scaled; see
    `maxlm.model.layers.transfer`.
    """
    D, L, (m, d) = config.dim, config.num_layers, transfer_of(config)
    if config.init == 'small':
        small, table_std = _normal(math.sqrt(2 / (5 * D))), math.sqrt(2 / (5 * (config.base_dim or D)))
        residual = _normal(2 / (L * math.sqrt(D)))
        return Initializers(_normal(table_std), _normal(table_std), small, small, residual, _normal(table_std / m))
    if config.init in ('uniform', 'uniform_2026'):
        std, factor = (1.0, 1.0) if config.init == 'uniform' else (0.8, 0.4)
        # With such a standard deviation, tied embeddings would give logits of about sqrt(dim).
        embedding, bound = _normal(config.init_std if config.tie_embeddings else std), math.sqrt(3 / D)
        into, into_feedforward = _symmetric_uniform(bound), _symmetric_uniform(factor * bound)
        return Initializers(embedding, embedding, into, into_feedforward, _zeros, _normal(0.001 / m))
    assert config.init == 'normal', config.init
    std = config.init_std
    into, residual = _normal(std / math.sqrt(m)), _normal(std / math.sqrt(m) / math.sqrt(2 * L / d) / d)
    return Initializers(_normal(std), _normal(std / 2), into, into, residual, _normal(std / m))


def _symmetric_uniform(bound: float) -> Initializer:
    def init(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
