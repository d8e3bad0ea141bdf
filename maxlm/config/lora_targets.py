"""Projections of a block that can have LoRA adapters (Hu et al. 2022, "LoRA")."""

from __future__ import annotations

from maxlm.config.schema import ModelConfig


def projections(model: ModelConfig) -> tuple[str, ...]:
    """Returns the dotted names, within a block, of the projections that can have adapters."""
    gate = ('feedforward.gate',) if model.activation == 'swiglu' else ()
    attention = tuple(f'attention.{name}' for name in ('query', 'key', 'value', 'out'))
    return (*attention, *gate, 'feedforward.up', 'feedforward.down')
