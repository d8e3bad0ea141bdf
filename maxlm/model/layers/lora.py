"""LoRA adapters: low-rank updates of projections (Hu et al. 2022, "LoRA").

A projection with an adapter is y = x · kernel + scale · (x · lora_a) · lora_b + bias; see `maxlm.model.layers.linear`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig

# Names of the adapter's parameters in a projection.
LORA_A, LORA_B = 'lora_a', 'lora_b'
# The logical axis of an adapter's rank.
RANK = 'adapter'


class Adapter(NamedTuple):
    """Rank and scale of the adapter of one projection. The product x · lora_a · lora_b is multiplied by `scale`."""

    rank: int
    scale: float


def adapter_of(model: ModelConfig, name: str) -> Adapter | None:
    """Returns the adapter of the projection with this name; None if it has no adapter."""
    assert name in model.projections, name
    if not model.lora_rank or not any(fnmatchcase(name, pattern) for pattern in model.lora_target_modules):
        return None
    return Adapter(model.lora_rank, adapter_scale(model))


def adapter_scale(model: ModelConfig) -> float:
    """Returns the scale of the adapters of a model with adapters, lora_alpha / lora_rank."""
    return model.lora_alpha / model.lora_rank


def adapter_parameters(
    key: jax.Array,
    rank: int,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    in_axes: tuple[str, ...],
    out_axes: tuple[str, ...],
) -> tuple[nnx.Param, nnx.Param]:
    """Returns lora_a [*in_shape, rank] and lora_b [rank, *out_shape].

    lora_a is sampled from U(±1 / sqrt(fan in)), as in the paper's code and in PEFT, which call it Kaiming uniform with
    a = sqrt(5). lora_b is 0, so the adapter initially does not change the model.
    """
    num_in = len(in_shape)
    uniform = jax.nn.initializers.variance_scaling(
        1 / 3, 'fan_in', 'uniform', in_axis=tuple(range(num_in)), out_axis=num_in
    )
    lora_a = nnx.Param(uniform(key, (*in_shape, rank), jnp.float32), axes=(*in_axes, RANK))
    return lora_a, nnx.Param(jnp.zeros((rank, *out_shape), jnp.float32), axes=(RANK, *out_axes))
