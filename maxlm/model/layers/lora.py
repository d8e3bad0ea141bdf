"""Which projections of a block have low-rank adapters (Hu et al. 2022, "LoRA").

A projection is then y = x · kernel + scale · (x · lora_a) · lora_b + bias: see `maxlm.model.layers.linear`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from maxlm.config.lora_targets import projections
from maxlm.config.schema import ModelConfig

# What the parameters of an adapter are called, beside the kernel.
LORA_A, LORA_B = 'lora_a', 'lora_b'


class Adapter(NamedTuple):
    """The adapter of one projection; `scale` is what its product is multiplied by."""

    rank: int
    scale: float


def adapter_of(model: ModelConfig, name: str) -> Adapter | None:
    """The adapter of the projection of this name; None where it has none."""
    assert name in projections(model), name
    if not model.lora_rank or not any(fnmatchcase(name, pattern) for pattern in model.lora_target_modules):
        return None
    return Adapter(model.lora_rank, adapter_scale(model))


def adapter_scale(model: ModelConfig) -> float:
    """What the products of a model's adapters are multiplied by; it has some."""
    return model.lora_alpha / model.lora_rank
