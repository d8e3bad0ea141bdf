"""Linear projections, which declare and apply every matrix of the decoder.

Shapes: M rows, I inputs, O outputs; each may have several axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.model.fp8 import kernel_products, mxfp8
from maxlm.model.fp8 import products as fp8
from maxlm.model.layers import rounded_inputs
from maxlm.model.layers.lora import RANK, Adapter, adapter_parameters
from maxlm.model.layers.projection_gradients import fan_out, narrowing_matmul
from maxlm.model.layers.weight_only_quantization import (
    Codes,
    Weights,
    apply_frozen,
    check_kernel,
    code_shapes,
    dequantize,
    quantize,
)
from maxlm.parallel.partitioning import Partitioning

Initializer = Callable[..., jax.Array]
# Input of projections in E4M3, with delayed scaling.
Fp8Input = fp8.DelayedScaling | kernel_products.RoundedInput
# Smallest number of rows for which a fused product is worth the concatenation of the kernels.
MIN_FUSED_ROWS = 1024
# Smallest number of inputs for which a kernel is transposed. With 384 inputs, the product of one row takes up to 20 %
# longer than with an untransposed kernel; with 768 inputs it does not. The product of 8 rows takes half the time.
MIN_TRANSPOSED_INPUTS = 256
# Largest number of rows for which the transposed kernel is the first factor of a product.
MAX_TRANSPOSED_ROWS = 256
# Names of the arrays of a projection that delayed scaling adds to the parameters: the kernel in E4M3 as bytes, and the
# scales, [3].
FP8_KERNEL, FP8_SCALES = 'fp8_kernel', 'fp8_scales'


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], init: Initializer) -> nnx.Param:
    """Creates a float32 parameter with its shape, initializer and logical axes.

    The axes are stored with the parameter; `maxlm.parallel.layout` maps them to the mesh.
    """
    return _parameter(rngs.params(), shape, axes, init)


def _parameter(key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], init: Initializer) -> nnx.Param:
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(init(key, shape, jnp.float32), axes=axes)


class Linear(nnx.Module):
    """Computes y = x · kernel + bias over one or more trailing axes, in the dtype of x or in the precision `matmul`.

    The last `len(in_shape)` axes of x are contracted and replaced by `out_shape`. An adapter adds
    scale · (x · lora_a) · lora_b (Hu et al. 2022, "LoRA"), always computed in the dtype of x. lora_a is
    [*in_shape, rank] and lora_b is [rank, *out_shape]. `quantize_kernel` replaces the kernel by kernel_codes and
    kernel_scales (`maxlm.model.layers.weight_only_quantization`).

    Attributes:
        is_transposed: True if the kernel is [*out_shape, *in_shape], as returned by `transpose_kernel`.
        joined_shapes: output shapes of the projections whose kernels are joined to this one; see `join`.
        is_bias_constant: True if the bias gets no gradient from the projection.
        has_fp8_kernels: True if a GPU kernel rounds the arrays of products with delayed scaling.
        rounds_inputs: True if inputs are rounded to 8 bits, by XLA or with packed codes (`is_packed`) in C++.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        in_axes: tuple[str, ...],
        out_axes: tuple[str, ...],
        init: Initializer,
        use_bias: bool,
        matmul: str,
        partitioning: Partitioning,
        rngs: nnx.Rngs,
        adapter: Adapter | None = None,
    ):
        self.axes = in_axes + out_axes
        key = rngs.params()
        self.kernel = _parameter(key, in_shape + out_shape, self.axes, init)
        # A bias is small, so it is sharded only along axes along which the output is sharded too.
        bias_axes = tuple('norm' if axis == 'embed' else axis for axis in out_axes)
        self.bias = parameter(rngs, out_shape, bias_axes, jax.nn.initializers.zeros) if use_bias else None
        lora_a, lora_b = None, None
        if adapter is not None:
            # The key is derived from the kernel's, so adapters do not change the initial values of other parameters.
            lora_key = jax.random.fold_in(key, 1)
            lora_a, lora_b = adapter_parameters(lora_key, adapter.rank, in_shape, out_shape, in_axes, out_axes)
        self.lora_a, self.lora_b = lora_a, lora_b
        self.weights: Weights | None = None
        self.fp8_kernel: nnx.Variable | None = None
        self.fp8_scales: nnx.Variable | None = None
        self.lora_scale = adapter.scale if adapter else 0.0
        self.is_transposed = False
        self.joined_shapes: tuple[tuple[int, ...], ...] = ()
        self.is_bias_constant = False
        self.has_fp8_kernels = self.rounds_inputs = self.is_packed = False
        self.num_in = len(in_shape)
        self.num_inputs = math.prod(in_shape)
        self.out_shape = out_shape
        self.partitioning = partitioning
        self.matmul = matmul

    def quantize_kernel(self, weights: Weights) -> None:
        """Replaces the kernel by codes and scales. Axes that do not divide over their devices are replicated."""
        assert self.weights is None, 'the kernel is quantized already'
        check_kernel(self.kernel.shape[: self.num_in], weights)

        def axes_of(shape: tuple[int, ...]) -> tuple[str, ...]:
            parts = map(self.partitioning.num_shards, self.axes)
            return tuple('norm' if size % n else axis for axis, size, n in zip(self.axes, shape, parts, strict=True))

        shape = self.kernel.shape
        self.weights = weights
        self.codes_axes, self.scales_axes = map(axes_of, code_shapes(shape, self.num_in, weights))
        found = quantize(self.kernel[...], self.num_in, weights)
        del self.kernel
        self.kernel_codes = nnx.Param(found.codes, axes=self.codes_axes)
        self.kernel_scales = nnx.Param(found.scales, axes=self.scales_axes)

    def add_delayed_scaling(self, *, has_kernels: bool) -> tuple[int, ...]:
        """Adds `FP8_KERNEL` and `FP8_SCALES` to a projection of abstract arrays; training sets their values.

        Args:
            has_kernels: value of `has_fp8_kernels`.

        Returns:
            The shape of the scales, [..., 3], with the axes over which the projection is stacked.
        """
        self.has_fp8_kernels = has_kernels
        shape = self.kernel.shape
        scales_shape = (*shape[: len(shape) - len(self.axes)], len(fp8.SCALED))
        self.fp8_kernel = nnx.data(nnx.Variable(jax.ShapeDtypeStruct(shape, jnp.uint8)))
        self.fp8_scales = nnx.data(nnx.Variable(jax.ShapeDtypeStruct(scales_shape, jnp.float32)))
        return scales_shape

    @property
    def should_be_transposed(self) -> bool:
        """Returns True if the kernel should be transposed for decoding. Quantized and FP8 kernels should not."""
        should = should_transpose(self.num_inputs, self.partitioning.platform)
        return self.weights is None and self.matmul == 'default' and should

    def join(self, others: Sequence[Linear]) -> None:
        """Changes this projection to compute the products of others too; `fused_apply` splits its output.

        `can_join` must be true. The kernel becomes [I, O], or [O, I] if it is transposed, and the bias [O], where O is
        the number of all outputs. The others keep no parameters.
        """
        self.joined_shapes = tuple(linear.out_shape for linear in (self, *others))
        self.out_shape = (sum(map(math.prod, self.joined_shapes)),)
        # Nothing is sharded, so the names of the axes do not matter.
        self.axes = (*self.axes[: self.num_in], 'norm')
        if self.weights is not None:
            self.codes_axes = self.scales_axes = self.axes
        for linear in others:
            for name in ('kernel', 'kernel_codes', 'kernel_scales', 'bias'):
                if getattr(linear, name, None) is not None:
                    delattr(linear, name)

    def quantized_input(self, x: jax.Array) -> Fp8Input | None:
        """Returns an input in E4M3, which projections of the same input share; None without delayed scaling."""
        if self.fp8_scales is None:
            return None
        if self.has_fp8_kernels:
            return kernel_products.round_input(self._rows(x), self.fp8_scales[...], self.partitioning)
        return fp8.quantize_input(self._rows(x), self.fp8_scales[...])

    def __call__(self, x: jax.Array, quantized: Fp8Input | None = None) -> jax.Array:
        """Returns the projection of x. `quantized` is its `quantized_input` of this or another projection."""
        rows = x.shape[: x.ndim - self.num_in]
        flat = self.num_inputs
        if self.weights is not None:
            if self.is_packed:
                stored, size = Codes(self.kernel_codes[...], self.kernel_scales[...]), math.prod(self.out_shape)
                y = rounded_inputs.product(x.reshape(-1, flat), stored, size, self.weights.kind)
                return self._completed(y.reshape(*rows, *self.out_shape), self._lowered(x))
            x_rounded = rounded_inputs.round_rows(x.reshape(-1, flat)).reshape(x.shape) if self.rounds_inputs else x
            product = partial(self._product, num_in=self.num_in)
            y = apply_frozen(product, self._kernel_of(x.dtype), x_rounded, self._codes())
            return self._completed(y.reshape(*rows, *self.out_shape), self._lowered(x))
        if self.matmul == 'fp8':
            y = self._fp8_product(self._rows(x), quantized or self.quantized_input(x))
            return self._completed(y.reshape(*rows, *self.out_shape), self._lowered(x))
        kernel = self._gathered_kernel(x.dtype)
        if self.matmul == 'mxfp8':
            y = mxfp8.product(x.reshape(-1, flat), kernel.reshape(flat, -1), self.partitioning.platform)
        elif self.is_transposed:
            y = transposed_matmul(x.reshape(-1, flat), kernel.reshape(-1, flat), platform=self.partitioning.platform)
        else:
            y = self._product(x, kernel, self.num_in)
        return self._completed(y.reshape(*rows, *self.out_shape), self._lowered(x))

    def _fp8_product(self, x_MI: jax.Array, quantized: Fp8Input | None) -> jax.Array:
        if isinstance(quantized, kernel_products.RoundedInput):
            return kernel_products.product(x_MI, self.fp8_projection(x_MI.dtype), quantized, self.partitioning)
        if quantized is not None and self.fp8_scales is not None:
            quantized = quantized._replace(scales=self.fp8_scales[...])
        # The kernel is used only for its gradient.
        slot_IO = self._gathered_kernel(x_MI.dtype).reshape(self.num_inputs, -1)
        return fp8.product(x_MI, slot_IO, self._fp8_codes(), quantized)

    def fp8_projection(self, dtype: jnp.dtype) -> kernel_products.Projection:
        """Returns the arrays for GPU kernels, with gradients in `dtype`."""
        assert self.fp8_scales is not None, 'only training with delayed scaling uses the kernels'
        bias = self.bias[...].astype(dtype).reshape(-1) if self.bias is not None and self._sums_bias else None
        slot = self._gathered_kernel(dtype).reshape(self.num_inputs, -1)
        return kernel_products.Projection(slot, bias, self._fp8_codes(), self.fp8_scales[...])

    @property
    def _sums_bias(self) -> bool:
        """Returns True if `_fp8_product` adds the bias, whose gradient the kernel sums."""
        return self.has_fp8_kernels and not self.is_bias_constant

    def _fp8_codes(self) -> fp8.Fp8Codes:
        """Returns the kernel in E4M3, [I, O], which training with delayed scaling quantizes once per step."""
        if self.fp8_kernel is None or self.fp8_scales is None:
            codes = fp8.quantize(jax.lax.stop_gradient(self.kernel[...]), fp8.E4M3)
        else:
            codes = fp8.Fp8Codes(self.fp8_kernel[...], jax.lax.stop_gradient(self.fp8_scales[...])[1])
        # Only the codes are gathered, one byte each.
        return codes._replace(bits=self.partitioning.gathered(codes.bits, self.axes).reshape(self.num_inputs, -1))

    def _rows(self, x: jax.Array) -> jax.Array:
        """Returns x with flattened inputs, as a matrix if `_is_matrix`."""
        return x.reshape(*([-1] if self._is_matrix else x.shape[: x.ndim - self.num_in]), self.num_inputs)

    @property
    def _is_matrix(self) -> bool:
        # Inputs are flattened to a matrix. With more axes, XLA transposes the output's gradient for the product that
        # gives the kernel's gradient, which took a quarter of a small model's step on a CPU. If the length is sharded,
        # they are not flattened, because one axis cannot be sharded over the devices of both batch and length.
        return self.partitioning.num_shards('length') == 1

    def _product(self, x: jax.Array, matrix: jax.Array, num_in: int) -> jax.Array:
        """Contracts the last `num_in` axes of x with the first `num_in` axes of `matrix`.

        The remaining axes of the result may be flattened.
        """
        if not self._is_matrix:
            return jnp.tensordot(x, matrix, axes=num_in)
        flat = math.prod(x.shape[x.ndim - num_in :])
        x, matrix = x.reshape(-1, flat), matrix.reshape(flat, -1)
        if self.partitioning.platform == 'cpu' and flat > matrix.shape[1]:
            return narrowing_matmul(x, matrix)
        return x @ matrix

    def effective_kernel(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the kernel [*in_shape, *out_shape] with its adapter, dequantized and gathered, in `dtype`."""
        kernel = self._gathered_kernel(dtype)
        if self.is_transposed:
            kernel = transpose_kernel(kernel, len(self.out_shape))
        lora_a = self._gathered_lora_a(dtype)
        if lora_a is None or self.lora_b is None:
            return kernel
        lora_b = self._gathered(self.lora_b, (RANK, *self.axes[self.num_in :]), dtype)
        return kernel + jnp.tensordot(lora_a * self.lora_scale, lora_b, axes=1)

    def _gathered_kernel(self, dtype: jnp.dtype) -> jax.Array:
        if self.weights is not None:
            return self._kernel_of(dtype)(self._codes())
        num = self.num_in
        axes = (*self.axes[num:], *self.axes[:num]) if self.is_transposed else self.axes
        return self._gathered(self.kernel, axes, dtype)

    def _codes(self) -> Codes:
        # Only codes and scales are gathered, not the kernel.
        codes = self.partitioning.gathered(self.kernel_codes[...], self.codes_axes)
        return Codes(codes, self.partitioning.gathered(self.kernel_scales[...], self.scales_axes))

    def _kernel_of(self, dtype: jnp.dtype) -> Callable[[Codes], jax.Array]:
        assert self.weights is not None
        return partial(dequantize, num_in=self.num_in, kind=self.weights.kind, dtype=dtype)

    def _gathered(self, param: nnx.Param, axes: tuple[str, ...], dtype: jnp.dtype) -> jax.Array:
        # Conversion to the compute dtype before the gather halves the communication.
        with jax.named_scope('cast'):
            cast = param[...].astype(dtype)
        return self.partitioning.gathered(cast, axes)

    def _gathered_lora_a(self, dtype: jnp.dtype) -> jax.Array | None:
        axes = (*self.axes[: self.num_in], RANK)
        return None if self.lora_a is None else self._gathered(self.lora_a, axes, dtype)

    def _lowered(self, x: jax.Array) -> jax.Array | None:
        """Returns x · lora_a, [..., rank]; None without an adapter."""
        lora_a = self._gathered_lora_a(x.dtype)
        if lora_a is None:
            return None
        return self._product(x, lora_a, self.num_in).reshape(*x.shape[: x.ndim - self.num_in], -1)

    def _completed(self, y: jax.Array, lowered: jax.Array | None) -> jax.Array:
        """Adds the contributions of adapter and bias to the product."""
        if self.lora_b is not None:
            assert lowered is not None
            lora_b = self._gathered(self.lora_b, (RANK, *self.axes[self.num_in :]), y.dtype)
            # The scale is applied to the smallest array.
            y = y + self._product(lowered * self.lora_scale, lora_b, 1).reshape(y.shape)
        if self.bias is None or self._sums_bias:
            return y
        bias = jax.lax.stop_gradient(self.bias[...]) if self.is_bias_constant else self.bias[...]
        bias = bias.astype(y.dtype)
        if not self._is_matrix:
            return y + jnp.expand_dims(bias, range(y.ndim - bias.ndim))
        # Added to a matrix, which cuBLAS does within the product.
        return (y.reshape(-1, bias.size) + bias.reshape(1, -1)).reshape(y.shape)

    @property
    def _is_whole(self) -> bool:
        """Returns True if each device uses the entire kernel in a plain product of two matrices."""
        split = any(self.partitioning.num_shards(axis) > 1 for axis in (*self.axes[self.num_in :], 'length'))
        # Concatenating dequantized kernels would write them to memory.
        return not split and self.matmul == 'default' and self.weights is None and not self.is_transposed


def transpose_kernel(kernel: jax.Array, num_in: int) -> jax.Array:
    """Transposes a kernel [*in_shape, *out_shape] with `num_in` input axes to [*out_shape, *in_shape].

    With `num_in` = 0 the kernel is unchanged.
    """
    return kernel.transpose(*range(num_in, kernel.ndim), *range(num_in))


def should_transpose(num_inputs: int, platform: str) -> bool:
    """Returns True if `transposed_matmul` is faster for a few rows of `num_inputs` and hardly slower for one row."""
    return platform == 'gpu' or num_inputs >= MIN_TRANSPOSED_INPUTS


def transposed_matmul(
    x_MI: jax.Array, kernel_OI: jax.Array, dtype: jax.typing.DTypeLike | None = None, *, platform: str = 'cpu'
) -> jax.Array:
    """Returns x · kernelᵀ, [M, O] in `dtype`, which defaults to the dtype of x.

    CPU matrix libraries reorder the second factor of a product, which takes longer than the product of a few rows. The
    kernel is therefore the first factor. With 8 rows and a kernel of 2048 × 2048 this halves the time.

    On a GPU, the product of one row is a sum over the rows of the kernel, in float32. XLA would round the terms of such
    a product to the dtype of its factors, or convert the kernel to float32 in memory.
    """
    contracted = (((1,), (1,)), ((), ()))
    if platform == 'gpu' and len(x_MI) == 1:
        products_OI = kernel_OI.astype(jnp.float32) * x_MI.astype(jnp.float32)
        return products_OI.sum(axis=1)[None].astype(dtype or x_MI.dtype)
    if platform == 'gpu' or len(x_MI) > MAX_TRANSPOSED_ROWS:
        return jax.lax.dot_general(x_MI, kernel_OI, contracted, preferred_element_type=dtype)
    y_OM = jax.lax.dot_general(kernel_OI, x_MI, contracted, preferred_element_type=dtype)
    # Without the barrier, XLA rewrites this as the product with the kernel as second factor.
    return jax.lax.optimization_barrier(y_OM).T


def fused_apply(linears: Sequence[Linear], x: jax.Array) -> list[jax.Array]:
    """Applies several projections to the last axis of x, on a CPU as one product if nothing is sharded.

    One wide product and its gradient are faster than several products on a CPU. On an accelerator, the concatenation of
    the kernels and of the gradients would move more bytes than the separate products. Kernels that `Linear.join` has
    joined are one product everywhere.
    """
    if shapes := linears[0].joined_shapes:
        parts = jax.lax.split(linears[0](x), list(map(math.prod, shapes)), axis=x.ndim - 1)
        return [part.reshape(*x.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
    is_fused = linears[0].partitioning.platform == 'cpu' and all(linear._is_whole for linear in linears)
    if x.size < MIN_FUSED_ROWS * x.shape[-1] or not is_fused:
        quantized = linears[0].quantized_input(x)
        return [linear(copy, quantized) for linear, copy in zip(linears, fan_out(x, len(linears)), strict=True)]
    products = _fused_products(x, [linear._gathered_kernel(x.dtype).reshape(x.shape[-1], -1) for linear in linears])
    lora_as = [linear._gathered_lora_a(x.dtype) for linear in linears]
    # Adapters have a separate product, because frozen kernels need no gradient.
    present = [lora_a for lora_a in lora_as if lora_a is not None]
    lowered = iter(_fused_products(x, present) if present else [])
    return [
        linear._completed(
            product.reshape(*x.shape[:-1], *linear.out_shape),
            None if lora_a is None else next(lowered).reshape(*x.shape[:-1], -1),
        )
        for linear, product, lora_a in zip(linears, products, lora_as, strict=True)
    ]


def _fused_products(x: jax.Array, matrices: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns the products of x with each matrix [in, out], computed as one product."""
    y = x.reshape(-1, x.shape[-1]) @ jnp.concatenate(matrices, axis=1)
    return jax.lax.split(y, [matrix.shape[1] for matrix in matrices], axis=1)
