"""Quantizes and dequantizes trees of parameters, for tests of models with quantized kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.weight_only_quantization import (
    CODES,
    KERNEL,
    SCALES,
    Codes,
    dequantize,
    per_expert,
    quantize,
    quantized_kernels,
    weights_of,
)


def quantized(params: Mapping[str, Any], model: ModelConfig, module: str = '') -> dict[str, Any]:
    """Returns the parameters with codes and scales in place of the kernels that the model quantizes."""
    found = {
        name: quantized(value, model, f'{module}{name}.') if isinstance(value, Mapping) else value
        for name, value in params.items()
    }
    path = f'{module}{KERNEL}'
    if path in quantized_kernels(model):
        run = partial(quantize, num_in=quantized_kernels(model)[path], weights=weights_of(model))
        codes = jax.vmap(per_expert(run, path))(found.pop(KERNEL))
        found |= {CODES: codes.codes, SCALES: codes.scales}
    return found


def dequantized(params: Mapping[str, Any], model: ModelConfig, module: str = '') -> dict[str, Any]:
    """Returns the parameters with float32 kernels in place of codes and scales."""
    found = {
        name: dequantized(value, model, f'{module}{name}.') if isinstance(value, Mapping) else value
        for name, value in params.items()
    }
    if CODES in found:
        path = f'{module}{KERNEL}'
        num_in, kind = quantized_kernels(model)[path], model.weight_quantization
        run = partial(dequantize, num_in=num_in, kind=kind, dtype=jnp.float32)
        found[KERNEL] = jax.vmap(per_expert(run, path))(Codes(found.pop(CODES), found.pop(SCALES)))
    return found
