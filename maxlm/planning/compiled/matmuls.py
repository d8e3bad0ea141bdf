"""Counts the operations of matrix products in compiled programs: dot, convolution, and calls of cuBLAS and cuDNN."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from maxlm.planning.compiled.hlo import Array, Instruction

_WINDOW = re.compile(r', window=\{([^}]*)\}')
_LIBRARY = re.compile(r'custom_call_target="(__cublas\$|__cudnn\$blockScaledDot)')
_LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')


class _Dimension(NamedTuple):
    """One dimension of a convolution's window, with the fields of XLA's text format."""

    size: int = 1
    stride: int = 1
    pad: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


def product_flops(instruction: Instruction, operands: list[Array]) -> float:
    """Returns the operations of a matrix product, two for a multiply-add; 0 for any other instruction.

    Args:
        instruction: instruction of any kind.
        operands: its operand arrays.

    Raises:
        ValueError: the dimensions of a product cannot be parsed.
    """
    if instruction.opcode == 'dot':
        return _contraction(instruction, operands[0], r'lhs_contracting_dims=\{([\d,]*)\}')
    if instruction.opcode == 'convolution':
        return _convolution(instruction, operands)
    if 'blockScaledDot' in instruction.attributes and is_library_product(instruction):
        # It multiplies the last axes of [B, M, K] and [B, N, K].
        return 2.0 * instruction.arrays[0].size * operands[0].dims[-1]
    if is_library_product(instruction):
        return _contraction(instruction, operands[0], r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
    return 0.0


def is_library_product(instruction: Instruction) -> bool:
    """Returns True if the instruction calls cuBLAS, or cuDNN for a product in MXFP8."""
    return instruction.opcode.startswith('custom-call') and bool(_LIBRARY.search(instruction.attributes))


def _contraction(instruction: Instruction, lhs: Array, pattern: str) -> float:
    dims = instruction.attribute(pattern)
    if dims is None:
        raise ValueError(
            f'cannot determine the dimensions of a matrix product; report it: '
            f'{instruction.name}: {instruction.attributes[:300]!r}'
        )
    depth = math.prod(lhs.dims[int(dim)] for dim in re.findall(r'\d+', dims))
    return 2.0 * instruction.arrays[0].size * depth


def _convolution(instruction: Instruction, operands: list[Array]) -> float:
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        raise ValueError(
            f'cannot determine the dimensions of a convolution; report it: '
            f'{instruction.name}: {instruction.attributes[:300]!r}'
        )
    lhs_labels, _, out_labels = labels.groups()
    lhs, out = operands[0].dims, instruction.arrays[0].dims
    groups = int(instruction.attribute(r'feature_group_count=(\d+)') or 1)
    groups *= int(instruction.attribute(r'batch_group_count=(\d+)') or 1)
    batch, features = lhs[lhs_labels.index('b')], lhs[lhs_labels.index('f')]
    products = 1.0 * batch * features * out[out_labels.index('f')] / groups
    for number, window in enumerate(_window(instruction)):
        label = str(number)
        products *= _meetings(window, lhs[lhs_labels.index(label)], out[out_labels.index(label)])
    return 2 * products


def _window(instruction: Instruction) -> list[_Dimension]:
    found = _WINDOW.search(instruction.attributes)
    if found is None:
        return []
    parts = dict(part.split('=') for part in found.group(1).split())
    columns = {
        # Only the low padding is needed: the output size implies the high padding.
        name: [int(value.split('_')[0]) for value in parts[name].split('x')]
        for name in _Dimension._fields
        if name in parts
    }
    return [_Dimension(**{name: column[i] for name, column in columns.items()}) for i in range(len(columns['size']))]


@functools.lru_cache(maxsize=4096)
def _meetings(window: _Dimension, inputs: int, outputs: int) -> int:
    """Counts the window reads of input elements, excluding padding and dilation holes.

    XLA writes batches of products as convolutions whose windows mostly read holes, which cost nothing.
    """
    if window.size == 1 and window.lhs_dilate == 1 and not window.pad:
        return outputs
    starts = np.arange(outputs)[:, None] * window.stride - window.pad
    places = starts + np.arange(window.size) * window.rhs_dilate
    within = (places >= 0) & (places <= (inputs - 1) * window.lhs_dilate) & (places % window.lhs_dilate == 0)
    return int(within.sum())
