"""Weight-only quantization: kernels stored as 8-bit or 4-bit codes with shared scales.

A kernel is dequantized to the compute dtype at each use; inputs are not rounded. Quantization needs no calibration
data: it selects the scale with the smallest squared error of the kernel among a few candidates.

    int8  −127 … 127                        one byte each
    int4  −8 … 7                            two per byte: neighbors along the last input axis
    fp8   e4m3, up to 448 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning")      one byte each

A scale belongs to one output and either all of its inputs or a group of neighbors along the last input axis.

Shapes: a kernel is [*in, *out] with in = [*rest, I]; codes are [*in, *out] or [*rest, I / 2, *out]; scales
[*rest, I / group, *out], or [1, …, 1, *out] where all inputs share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.families import is_of_experts
from maxlm.errors import InputError

# Name of a kernel, and names of the parameters that replace it in a quantized projection.
KERNEL, CODES, SCALES = 'kernel', 'kernel_codes', 'kernel_scales'
# Storage dtypes of the codes. fp8 is stored as bytes, because some libraries do not support the type.
CODE_DTYPES: dict[str, Any] = {'int8': jnp.int8, 'int4': jnp.uint8, 'fp8': jnp.uint8}
# bfloat16 has the range of float32. Its low precision is harmless, because codes are chosen for the stored scale.
SCALE_DTYPE = jnp.bfloat16
SMALLEST_GROUP = 8
_E4M3 = jnp.float8_e4m3fn
# Candidate scales, as multiples of the largest absolute element. Small scales clip the largest elements, which are few,
# and make the codes of all other elements finer. int4 also has negative scales, because its codes are asymmetric.
_SCALE_MULTIPLES = {
    'int8': tuple((1 - step / 40) / 127 for step in range(9)),
    'int4': tuple(sign * (8 / 7 - step / 28) / 8 for sign in (-1, 1) for step in range(17)),
    'fp8': (1 / 448,),
}


class Weights(NamedTuple):
    """Storage format of kernels.

    Attributes:
        kind: a format of `QUANTIZATION_GROUPS`.
        group: largest number of inputs that share a scale; 0 means all.
    """

    kind: str
    group: int


class Codes(NamedTuple):
    """A quantized kernel; see the module docstring for shapes and dtypes."""

    codes: jax.Array
    scales: jax.Array


def weights_of(model: ModelConfig) -> Weights | None:
    """Returns the storage format of a model's kernels; None if they are float32."""
    weights = Weights(model.weight_quantization, model.quantization_group_size)
    return None if weights.kind == 'float' else weights


def quantized_kernels(model: ModelConfig) -> dict[str, int]:
    """Returns the number of input axes of each quantized kernel (all projections of the blocks), by dotted path.

    The kernels of experts have an additional first axis; see `per_expert`.
    """
    dense = ('feedforward.gate', 'feedforward.up', 'feedforward.down')
    found = {}
    for name in model.projections:
        num_in = 2 if name == 'attention.out' else 1
        if not (model.num_experts and name in dense):
            found[f'blocks.{name}.{KERNEL}'] = num_in
        if model.num_dense_layers and (name in dense or name.startswith('attention.')):
            found[f'dense_blocks.{name}.{KERNEL}'] = num_in
    return found


def per_expert(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Returns a function of the kernel of one layer; for the experts of a layer, it maps over their axis."""
    return jax.vmap(function) if is_of_experts(path) else function


def group_size(inputs: int, group: int) -> int:
    """Returns the largest divisor of the last input axis that is at most `group`; 0 if all inputs share a scale."""
    if not group:
        return 0
    return next(size for size in range(min(group, inputs), 0, -1) if inputs % size == 0)


def quantization_error(in_shape: tuple[int, ...], weights: Weights) -> str:
    """Returns the reason why a kernel with these inputs cannot be stored in this format, or '' if it can.

    The reason is the last part of an error message.
    """
    inputs = in_shape[-1]
    if weights.kind == 'int4' and inputs % 2:
        return f'an odd number of inputs ({inputs}), but int4 stores two per byte'
    size = group_size(inputs, weights.group)
    if weights.group and size < min(SMALLEST_GROUP, inputs):
        return f'{inputs} inputs, which no group size from {SMALLEST_GROUP} to {weights.group} divides'
    return ''


def check_kernel(in_shape: tuple[int, ...], weights: Weights) -> None:
    """Raises InputError if a kernel with these inputs cannot be stored in this format."""
    if reason := quantization_error(in_shape, weights):
        raise InputError(
            f'model.weight_quantization={weights.kind}: a kernel has {reason}; choose another format, or another '
            'model.quantization_group_size'
        )


def code_shapes(shape: tuple[int, ...], num_in: int, weights: Weights) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of codes and scales of a kernel whose first `num_in` axes are inputs."""
    in_shape, out_shape = shape[:num_in], shape[num_in:]
    packed = in_shape[-1] // 2 if weights.kind == 'int4' else in_shape[-1]
    size = group_size(in_shape[-1], weights.group)
    scales = (*in_shape[:-1], in_shape[-1] // size) if size else (1,) * num_in
    return (*in_shape[:-1], packed, *out_shape), (*scales, *out_shape)


def quantize(kernel: jax.Array, num_in: int, weights: Weights) -> Codes:
    """Quantizes a kernel; each code is the nearest to its element. The function can be compiled.

    Args:
        kernel: [*in, *out], finite.
        num_in: number of input axes.
        weights: storage format, for which `quantization_error` must return ''.
    """
    values = _grouped(kernel.astype(jnp.float32), num_in, weights)
    axes = _shared_axes(num_in, weights)
    largest = jnp.max(jnp.abs(values), axis=axes, keepdims=True)

    def scaled(multiple: jax.Array | float) -> jax.Array:
        # The scale of zeros must not be 0.
        return jnp.where(largest > 0, largest * multiple, 1).astype(SCALE_DTYPE).astype(jnp.float32)

    def error(multiple: jax.Array) -> jax.Array:
        scales = scaled(multiple)
        difference = _values(_round(values / scales, weights.kind), weights.kind) * scales - values
        return jnp.sum(jnp.square(difference), axis=axes, keepdims=True)

    multiples = jnp.asarray(_SCALE_MULTIPLES[weights.kind], jnp.float32)
    # Candidates are evaluated sequentially, because together they would need a copy of the kernel each.
    best = multiples[jnp.argmin(jax.lax.map(error, multiples), axis=0)]
    scales = scaled(best)
    codes = _round(values / scales, weights.kind).reshape(kernel.shape)
    _, scales_shape = code_shapes(kernel.shape, num_in, weights)
    return Codes(_packed(codes, num_in, weights.kind), scales.astype(SCALE_DTYPE).reshape(scales_shape))


def dequantize(stored: Codes, num_in: int, kind: str, dtype: Any) -> jax.Array:
    """Returns the kernel [*in, *out] as floats. The function can be compiled.

    Args:
        stored: codes and scales returned by `quantize`.
        num_in: number of input axes.
        kind: kind of the codes.
        dtype: dtype of the result. Codes and scales are multiplied in float32.
    """
    values = _values(_unpacked(stored.codes, num_in, kind), kind)
    shape, (axis, inputs) = values.shape, (num_in - 1, values.shape[num_in - 1])
    groups = stored.scales.shape[axis]
    grouped = values.reshape(*shape[:axis], groups, inputs // groups, *shape[num_in:])
    scales = jnp.expand_dims(stored.scales.astype(jnp.float32), num_in)
    return (grouped * scales).reshape(shape).astype(dtype)


def apply_frozen(
    product: Callable[..., jax.Array],
    kernel_of: Callable[[Codes], jax.Array],
    x: jax.Array,
    stored: Codes,
    *more: Any,
    forward: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Returns `product(x, kernel_of(stored), *more)`, which is differentiable with respect to x alone.

    The backward pass dequantizes the kernel again (Dettmers et al. 2023, "QLoRA"). JAX's own derivative would save the
    dequantized kernels of all layers.

    Args:
        product: function that is linear in x.
        kernel_of: `dequantize`, perhaps for several kernels.
        x: inputs.
        stored: codes and scales.
        more: other arrays of the product, which have no gradient.
        forward: function (x, stored, *more) that computes the same without a gradient; None: the product.
    """
    shape, dtype = x.shape, x.dtype

    @jax.custom_vjp
    def apply(x: jax.Array, stored: Codes, *more: Any) -> jax.Array:
        return product(x, kernel_of(stored), *more) if forward is None else forward(x, stored, *more)

    def save(x: jax.Array, stored: Codes, *more: Any) -> tuple[jax.Array, Any]:
        return apply(x, stored, *more), (stored, more)

    def backward(saved: Any, gradient: jax.Array) -> tuple[Any, ...]:
        stored, more = saved
        # The gradient of a linear function does not depend on x.
        _, vjp = jax.vjp(lambda x: product(x, kernel_of(stored), *more), jnp.zeros(shape, dtype))
        return *vjp(gradient), None, *[None] * len(more)

    apply.defvjp(save, backward)
    return apply(x, stored, *more)


def stored_bytes(shape: tuple[int, ...], num_in: int, weights: Weights) -> int:
    """Returns the size in bytes of the codes and scales of a kernel."""
    codes, scales = code_shapes(shape, num_in, weights)
    return math.prod(codes) + jnp.dtype(SCALE_DTYPE).itemsize * math.prod(scales)


def _grouped(values: jax.Array, num_in: int, weights: Weights) -> jax.Array:
    """Reshapes [*in, *out] to [*rest, I / group, group, *out]; unchanged if all inputs share a scale."""
    size = group_size(values.shape[num_in - 1], weights.group)
    return values.reshape(*values.shape[: num_in - 1], -1, size, *values.shape[num_in:]) if size else values


def _shared_axes(num_in: int, weights: Weights) -> tuple[int, ...]:
    """Returns the axes of the result of `_grouped` along which elements share a scale."""
    return (num_in,) if weights.group else tuple(range(num_in))


def _round(values: jax.Array, kind: str) -> jax.Array:
    """Returns the codes nearest to values that are given in units of their scale."""
    if kind == 'fp8':
        # Larger values would become NaN.
        largest = float(jnp.finfo(_E4M3).max)
        return jax.lax.bitcast_convert_type(jnp.clip(values, -largest, largest).astype(_E4M3), jnp.uint8)
    low, high = (-8, 7) if kind == 'int4' else (-127, 127)
    return jnp.clip(jnp.round(values), low, high).astype(jnp.int8)


def _values(codes: jax.Array, kind: str) -> jax.Array:
    """Returns unpacked codes as float32."""
    return (jax.lax.bitcast_convert_type(codes, _E4M3) if kind == 'fp8' else codes).astype(jnp.float32)


def _packed(codes: jax.Array, num_in: int, kind: str) -> jax.Array:
    """Packs int4 codes two per byte, the first in the lower half; returns other kinds unchanged."""
    if kind != 'int4':
        return codes
    axis = num_in - 1
    pairs = codes.reshape(*codes.shape[:axis], codes.shape[axis] // 2, 2, *codes.shape[num_in:])
    low, high = (jnp.take(pairs, half, axis=num_in).astype(jnp.uint8) & 15 for half in (0, 1))
    return low | (high << 4)


def _unpacked(codes: jax.Array, num_in: int, kind: str) -> jax.Array:
    """Unpacks the codes, the inverse of `_packed`."""
    if kind != 'int4':
        return codes
    # Right shifts of signed integers extend the sign.
    halves = [jax.lax.bitcast_convert_type(half, jnp.int8) >> 4 for half in (codes << 4, codes)]
    pairs = jnp.stack(halves, axis=num_in)
    return pairs.reshape(*codes.shape[: num_in - 1], 2 * codes.shape[num_in - 1], *codes.shape[num_in:])
