"""Random LoRA adapters for tests; initialized adapters have no effect because lora_b is zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxlm.checkpoint.conversion.merge_lora import adapter_shapes
from maxlm.config.schema import ModelConfig


def adapter_arrays(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random adapters by dotted path, large enough to change the output by about its own size."""
    rng = np.random.default_rng(seed)
    return {path: rng.standard_normal(shape, np.float32) * 0.2 for path, shape in adapter_shapes(model).items()}


def with_arrays(params: Mapping[str, Any], arrays: Mapping[str, np.ndarray], prefix: str = '') -> dict[str, Any]:
    """Returns the parameters with the given arrays replaced by dotted path."""
    return {
        name: with_arrays(value, arrays, f'{prefix}{name}.')
        if isinstance(value, Mapping)
        else arrays.get(f'{prefix}{name}', value)
        for name, value in params.items()
    }
