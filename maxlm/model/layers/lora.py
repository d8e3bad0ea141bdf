"""LoRA adapters: low-rank updates of projections (Hu et al. 2022, "LoRA").

A projection with an adapter is y = x · kernel + scale · (x · lora_a) · lora_b + bias; see `maxlm.model.layers.linear`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from maxlm.config.schema import ModelConfig

# Names of the adapter's parameters in a projection.
LORA_A, LORA_B = 'lora_a', 'lora_b'


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
