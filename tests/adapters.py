"""Adapters that do something, for tests: where they start, lora_b is zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxlm.checkpoint.merge_lora import adapter_shapes
from maxlm.config.schema import ModelConfig


def adapter_arrays(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random adapters by dotted path, of a size that changes what comes out by about as much as it is."""
    rng = np.random.default_rng(seed)
    return {path: rng.standard_normal(shape, np.float32) * 0.2 for path, shape in adapter_shapes(model).items()}


def with_arrays(params: Mapping[str, Any], arrays: Mapping[str, np.ndarray], prefix: str = '') -> dict[str, Any]:
    """Parameters, some of which are replaced by their dotted path."""
    return {
        name: with_arrays(value, arrays, f'{prefix}{name}.')
        if isinstance(value, Mapping)
        else arrays.get(f'{prefix}{name}', value)
        for name, value in params.items()
    }
