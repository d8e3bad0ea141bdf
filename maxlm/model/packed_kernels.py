"""Packs quantized kernels for products with rounded inputs (`maxlm.model.layers.rounded_inputs`).

Shapes: I inputs, O outputs, G groups of inputs that share a scale, V vocabulary, D dim.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from maxlm.model.layers.rounded_inputs import BLOCK, PANEL


def pack_codes(codes: Any, num_in: int, kind: str) -> np.ndarray:
    """Packs the codes of a kernel, which `weight_only_quantization.quantize` returns.

    Args:
        codes: [*in, *out], or [*rest, I / 2, *out] for int4.
        num_in: number of input axes.
        kind: kind of the codes.

    Returns:
        uint8 [O / 16, I / 4, 16, 4] for int8 and [O / 16, I / 8, 16, 4] for int4; see `maxlm/runtime/cpu_kernels.cc`.
    """
    codes = np.asarray(codes)
    codes_IO = codes.reshape(math.prod(codes.shape[:num_in]), -1)
    if kind == 'int4':
        # Neighbors along the inputs share a byte. The kernel of the library needs codes + 8.
        codes_IO = np.stack([codes_IO & 15, codes_IO >> 4], axis=1).reshape(2 * len(codes_IO), -1) ^ 8
    inputs, outputs = -len(codes_IO) % BLOCK, -codes_IO.shape[1] % PANEL
    # The inputs of padding are 0.
    codes_IO = np.pad(codes_IO, ((0, inputs), (0, outputs)))
    panels = codes_IO.shape[1] // PANEL
    if kind == 'int8':
        return np.ascontiguousarray(codes_IO.reshape(-1, 4, panels, PANEL).transpose(2, 0, 3, 1)).view(np.uint8)
    low, high = codes_IO.reshape(-1, 2, 4, panels, PANEL).transpose(1, 3, 0, 4, 2)
    return np.ascontiguousarray(low | high << 4)


def pack_scales(scales: Any, num_in: int) -> np.ndarray:
    """Packs the scales of a kernel [*in groups, *out] to float32 [O / 16, G, 16]."""
    scales = np.asarray(scales).astype(np.float32)
    scales_GO = scales.reshape(math.prod(scales.shape[:num_in]), -1)
    scales_GO = np.pad(scales_GO, ((0, 0), (0, -scales_GO.shape[1] % PANEL)))
    return np.ascontiguousarray(scales_GO.reshape(len(scales_GO), -1, PANEL).transpose(1, 0, 2))


def pack_table(table_VD: Any) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes a float table [V, D] to int8 with a scale per row, and packs it as the kernel [D, V] of the logits.

    Returns:
        Codes and scales as returned by `pack_codes` and `pack_scales`.
    """
    table_VD = np.asarray(table_VD).astype(np.float32)
    largest_V = np.max(np.abs(table_VD), axis=1)
    scales_V = np.where(largest_V > 0, largest_V / 127, 1).astype(np.float32)
    codes_VD = np.rint(table_VD / scales_V[:, None]).astype(np.int8)
    return pack_codes(codes_VD.T, 1, 'int8'), pack_scales(scales_V[None], 1)
