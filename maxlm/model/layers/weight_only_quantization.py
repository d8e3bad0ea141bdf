"""Kernels stored in 8 or 4 bits: codes, and scales that several of them share.

A kernel is the product of both, made anew in the type of the computation each time that it is used; inputs are not
rounded. Nothing is learned here: scales are those with the smallest squared error of the kernel among a few.

    int8  −127 … 127                        a byte each
    int4  −8 … 7                            two in a byte: neighbours along the last axis of inputs
    fp8   e4m3, up to 448 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning")      a byte each

A scale is for one output and either all of its inputs or a group of neighbours along the last axis of inputs.

Shapes: a kernel is [*in, *out] with in = [*rest, I]; codes are [*in, *out] or [*rest, I / 2, *out]; scales
[*rest, I / group, *out], or [1, …, 1, *out] where all inputs share them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.lora_targets import projections
from maxlm.config.schema import ModelConfig

# What the parameters of a quantized projection are called, in place of the kernel.
KERNEL, CODES, SCALES = 'kernel', 'kernel_codes', 'kernel_scales'
KINDS = ('int8', 'int4', 'fp8')
# Inputs that share a scale unless one asks for something else; 0 = all. Sixteen values need it finer.
DEFAULT_GROUPS = {'int8': 0, 'int4': 32, 'fp8': 0}
# What the codes of a kind are stored as. Of fp8 the bits: not every library knows the type.
CODE_DTYPES: dict[str, Any] = {'int8': jnp.int8, 'int4': jnp.uint8, 'fp8': jnp.uint8}
# With the range of float32. That it is coarse does no harm: codes are chosen for the scale as it is stored.
SCALE_DTYPE = jnp.bfloat16
SMALLEST_GROUP = 8
_E4M3 = jnp.float8_e4m3fn
# The scales that are tried: by them the largest element gets the code 127 / share, ±8 / share, 448 / share. Above it
# codes are cut off, which costs few elements and makes the others finer.
_SHARES = {
    'int8': tuple((1 - step / 40) / 127 for step in range(9)),
    'int4': tuple(sign * (8 / 7 - step / 28) / 8 for sign in (-1, 1) for step in range(17)),
    'fp8': (1 / 448,),
}


class Weights(NamedTuple):
    """How kernels are stored."""

    # One of KINDS.
    kind: str
    # Inputs that share a scale, at most; 0 = all.
    group: int


class Codes(NamedTuple):
    """A kernel; see the head of the file for shapes and types."""

    codes: jax.Array
    scales: jax.Array


def weights_of(model: ModelConfig) -> Weights | None:
    """How a model's kernels are stored; None where that is float32."""
    weights = Weights(model.weight_quantization, model.quantization_group_size)
    return None if weights.kind == 'float' else weights


def quantized_kernels(model: ModelConfig) -> dict[str, int]:
    """Dotted path → number of axes of inputs, of the kernels that are quantized: the projections of the blocks."""
    return {f'blocks.{name}.{KERNEL}': 2 if name == 'attention.out' else 1 for name in projections(model)}


def group_size(inputs: int, group: int) -> int:
    """The largest divisor of the last axis of inputs that is not above the group; 0 where all inputs share a scale."""
    if not group:
        return 0
    return next(size for size in range(min(group, inputs), 0, -1) if inputs % size == 0)


def quantization_error(in_shape: tuple[int, ...], weights: Weights) -> str:
    """What keeps a kernel with these inputs from being stored so, as the end of a message; nothing: ''."""
    inputs = in_shape[-1]
    if weights.kind == 'int4' and inputs % 2:
        return f'an odd number of inputs ({inputs}), and int4 stores two in a byte'
    size = group_size(inputs, weights.group)
    if weights.group and size < min(SMALLEST_GROUP, inputs):
        return f'{inputs} inputs, which groups of {SMALLEST_GROUP} to {weights.group} do not divide'
    return ''


def code_shapes(shape: tuple[int, ...], num_in: int, weights: Weights) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and the scales of a kernel of which the first `num_in` axes are inputs."""
    in_shape, out_shape = shape[:num_in], shape[num_in:]
    packed = in_shape[-1] // 2 if weights.kind == 'int4' else in_shape[-1]
    size = group_size(in_shape[-1], weights.group)
    scales = (*in_shape[:-1], in_shape[-1] // size) if size else (1,) * num_in
    return (*in_shape[:-1], packed, *out_shape), (*scales, *out_shape)


def quantize(kernel: jax.Array, num_in: int, weights: Weights) -> Codes:
    """The kernel in codes, each the nearest of those that there are. Pure: it can be compiled.

    Args:
        kernel: [*in, *out], finite.
        num_in: axes of inputs.
        weights: how to store it; `quantization_error` has nothing against that.
    """
    values = _grouped(kernel.astype(jnp.float32), num_in, weights)
    axes = _shared_axes(num_in, weights)
    largest = jnp.max(jnp.abs(values), axis=axes, keepdims=True)

    def scaled(share: jax.Array | float) -> jax.Array:
        # Zeros have a scale too.
        return jnp.where(largest > 0, largest * share, 1).astype(SCALE_DTYPE).astype(jnp.float32)

    def error(share: jax.Array) -> jax.Array:
        scales = scaled(share)
        difference = _values(_round(values / scales, weights.kind), weights.kind) * scales - values
        return jnp.sum(jnp.square(difference), axis=axes, keepdims=True)

    shares = jnp.asarray(_SHARES[weights.kind], jnp.float32)
    # One after the other: side by side they would take as many times the kernel's memory.
    best = shares[jnp.argmin(jax.lax.map(error, shares), axis=0)]
    scales = scaled(best)
    codes = _round(values / scales, weights.kind).reshape(kernel.shape)
    _, scales_shape = code_shapes(kernel.shape, num_in, weights)
    return Codes(_packed(codes, num_in, weights.kind), scales.astype(SCALE_DTYPE).reshape(scales_shape))


def dequantize(stored: Codes, num_in: int, kind: str, dtype: Any) -> jax.Array:
    """The kernel [*in, *out] in a floating type. Pure: it can be compiled.

    Args:
        stored: as `quantize` returned it.
        num_in: axes of inputs.
        kind: of the codes.
        dtype: of the result; the product is made in float32.
    """
    values = _values(_unpacked(stored.codes, num_in, kind), kind)
    shape, (axis, inputs) = values.shape, (num_in - 1, values.shape[num_in - 1])
    groups = stored.scales.shape[axis]
    grouped = values.reshape(*shape[:axis], groups, inputs // groups, *shape[num_in:])
    scales = jnp.expand_dims(stored.scales.astype(jnp.float32), num_in)
    return (grouped * scales).reshape(shape).astype(dtype)


def stored_bytes(shape: tuple[int, ...], num_in: int, weights: Weights) -> int:
    """Bytes of the codes and the scales of a kernel."""
    codes, scales = code_shapes(shape, num_in, weights)
    return math.prod(codes) + jnp.dtype(SCALE_DTYPE).itemsize * math.prod(scales)


def _grouped(values: jax.Array, num_in: int, weights: Weights) -> jax.Array:
    """[*in, *out] → [*rest, I / group, group, *out], or itself where all inputs share a scale."""
    size = group_size(values.shape[num_in - 1], weights.group)
    return values.reshape(*values.shape[: num_in - 1], -1, size, *values.shape[num_in:]) if size else values


def _shared_axes(num_in: int, weights: Weights) -> tuple[int, ...]:
    """Axes of what `_grouped` returns along which a scale is the same."""
    return (num_in,) if weights.group else tuple(range(num_in))


def _round(values: jax.Array, kind: str) -> jax.Array:
    """The codes nearest to values in units of their scale."""
    if kind == 'fp8':
        # To the largest: above it the type has a NaN.
        largest = float(jnp.finfo(_E4M3).max)
        return jax.lax.bitcast_convert_type(jnp.clip(values, -largest, largest).astype(_E4M3), jnp.uint8)
    low, high = (-8, 7) if kind == 'int4' else (-127, 127)
    return jnp.clip(jnp.round(values), low, high).astype(jnp.int8)


def _values(codes: jax.Array, kind: str) -> jax.Array:
    """Codes, one to an element, as float32."""
    return (jax.lax.bitcast_convert_type(codes, _E4M3) if kind == 'fp8' else codes).astype(jnp.float32)


def _packed(codes: jax.Array, num_in: int, kind: str) -> jax.Array:
    """As they are stored: of int4 two in a byte, the first in the lower half."""
    if kind != 'int4':
        return codes
    axis = num_in - 1
    pairs = codes.reshape(*codes.shape[:axis], codes.shape[axis] // 2, 2, *codes.shape[num_in:])
    low, high = (jnp.take(pairs, half, axis=num_in).astype(jnp.uint8) & 15 for half in (0, 1))
    return low | (high << 4)


def _unpacked(codes: jax.Array, num_in: int, kind: str) -> jax.Array:
    """The way back, one code to an element."""
    if kind != 'int4':
        return codes
    # The shifts of a signed number bring its sign along.
    halves = [jax.lax.bitcast_convert_type(half, jnp.int8) >> 4 for half in (codes << 4, codes)]
    pairs = jnp.stack(halves, axis=num_in)
    return pairs.reshape(*codes.shape[: num_in - 1], 2 * codes.shape[num_in - 1], *codes.shape[num_in:])
