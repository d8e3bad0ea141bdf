"""Linear projections of all experts, each with its own kernel.

Shapes: E experts, I inputs, O outputs, R rows sorted by expert, A rank of adapters.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.model.experts.grouped_matmul import RowGroups, grouped_matmul, looped_matmul
from maxlm.model.layers.linear import Initializer, parameter
from maxlm.model.layers.lora import RANK, Adapter
from maxlm.model.layers.weight_only_quantization import (
    Codes,
    Weights,
    apply_frozen,
    check_kernel,
    code_shapes,
    dequantize,
    quantize,
)
from maxlm.parallel.partitioning import Axes, Partitioning

# Arrays of a projection by the names of its parameters, as one device uses them.
Arrays = dict[str, jax.Array]


class ExpertLinear(nnx.Module):
    """Computes y = x · kernel[expert] + bias[expert] for rows that are sorted by expert.

    Parameters, adapters and quantization are those of `maxlm.model.layers.linear.Linear` with an axis of experts in
    front. `arrays` returns them for use outside of `jax.shard_map`, and `apply` uses them within.
    """

    def __init__(
        self,
        num_experts: int,
        in_dim: int,
        out_dim: int,
        *,
        in_axis: str,
        out_axis: str,
        init: Initializer,
        use_bias: bool,
        partitioning: Partitioning,
        rngs: nnx.Rngs,
        adapter: Adapter | None = None,
    ):
        E = num_experts
        self.axes = ('experts', in_axis, out_axis)
        self.bias_axes = ('experts', 'norm' if out_axis == 'expert_embed' else out_axis)
        self.kernel = parameter(rngs, (E, in_dim, out_dim), self.axes, init)
        self.bias = parameter(rngs, (E, out_dim), self.bias_axes, jax.nn.initializers.zeros) if use_bias else None
        lora_a, lora_b = None, None
        if adapter is not None:
            # The initial values of `Linear`.
            uniform = jax.nn.initializers.variance_scaling(
                1 / 3, 'fan_in', 'uniform', in_axis=-2, out_axis=-1, batch_axis=0
            )
            a_axes, b_axes = ('experts', in_axis, RANK), ('experts', RANK, out_axis)
            lora_a = parameter(rngs, (E, in_dim, adapter.rank), a_axes, uniform)
            lora_b = parameter(rngs, (E, adapter.rank, out_dim), b_axes, jax.nn.initializers.zeros)
        self.lora_a, self.lora_b = lora_a, lora_b
        self.lora_scale = adapter.scale if adapter else 0.0
        self.weights: Weights | None = None
        self.partitioning = partitioning

    def quantize_kernel(self, weights: Weights) -> None:
        """Replaces the kernel by codes and scales. Axes that do not divide over their devices are replicated."""
        assert self.weights is None, 'the kernel is quantized already'
        check_kernel(self.kernel.shape[1:2], weights)

        def axes_of(shape: tuple[int, ...]) -> Axes:
            parts = map(self.partitioning.num_shards, self.axes)
            return tuple('norm' if size % n else axis for axis, size, n in zip(self.axes, shape, parts, strict=True))

        experts, *matrix = self.kernel.shape
        self.weights = weights
        codes_shape, scales_shape = ((experts, *shape) for shape in code_shapes(tuple(matrix), 1, weights))
        self.codes_axes, self.scales_axes = axes_of(codes_shape), axes_of(scales_shape)
        found = jax.vmap(lambda kernel_IO: quantize(kernel_IO, 1, weights))(self.kernel[...])
        del self.kernel
        self.kernel_codes = nnx.Param(found.codes, axes=self.codes_axes)
        self.kernel_scales = nnx.Param(found.scales, axes=self.scales_axes)

    def arrays(self, dtype: jnp.dtype) -> dict[str, tuple[jax.Array, Axes]]:
        """Returns the parameters in the compute dtype, with their axes."""
        found: dict[str, tuple[jax.Array, Axes]] = {}
        if self.weights is not None:
            for name, axes in (('kernel_codes', self.codes_axes), ('kernel_scales', self.scales_axes)):
                found[name] = getattr(self, name)[...], axes
        else:
            with jax.named_scope('cast'):
                found['kernel'] = self.kernel[...].astype(dtype), self.axes
        if self.bias is not None:
            found['bias'] = self.bias[...].astype(dtype), self.bias_axes
        if self.lora_a is not None and self.lora_b is not None:
            _, in_axis, out_axis = self.axes
            for name, axes in (('lora_a', ('experts', in_axis, RANK)), ('lora_b', ('experts', RANK, out_axis))):
                found[name] = getattr(self, name)[...].astype(dtype), axes
        return found

    def apply(self, arrays: Arrays, x_RI: jax.Array, groups: RowGroups, kind: str) -> jax.Array:
        """Returns the outputs of the rows, [R, O].

        If the inputs are sharded, the outputs of the devices must be added.

        Args:
            arrays: shards of `arrays`, gathered along the axes that save memory.
            x_RI: rows, sorted by expert.
            groups: rows of each expert.
            kind: implementation of `grouped_matmul`.
        """
        y_RO = self._product(arrays, x_RI, groups, kind)
        if 'lora_a' in arrays:
            lowered_RA = grouped_matmul(x_RI, arrays['lora_a'], groups, kind) * self.lora_scale
            y_RO = y_RO + grouped_matmul(lowered_RA, arrays['lora_b'], groups, kind)
        if 'bias' in arrays:
            _, in_axis, _ = self.axes
            expert_R = jnp.searchsorted(jnp.cumsum(groups.sizes_E), jnp.arange(len(x_RI)), side='right')
            # Each device adds its part, because the outputs of the devices are added.
            y_RO = y_RO + (arrays['bias'] / self.partitioning.num_shards(in_axis)).at[expert_R].get(mode='clip')
        return y_RO

    def _product(self, arrays: Arrays, x_RI: jax.Array, groups: RowGroups, kind: str) -> jax.Array:
        if self.weights is None:
            return grouped_matmul(x_RI, arrays['kernel'], groups, kind)
        kernel_of = partial(dequantize, num_in=1, kind=self.weights.kind, dtype=x_RI.dtype)

        def product(x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
            return grouped_matmul(x_RI, kernel_EIO, groups._replace(sizes_E=sizes_E), kind)

        def looped(x_RI: jax.Array, stored: Codes, sizes_E: jax.Array) -> jax.Array:
            def of_expert(expert: jax.Array) -> jax.Array:
                return kernel_of(Codes(*(array[expert] for array in stored)))

            return looped_matmul(x_RI, of_expert, groups._replace(sizes_E=sizes_E))

        stored = Codes(arrays['kernel_codes'], arrays['kernel_scales'])
        forward = looped if kind == 'loop' else None
        return apply_frozen(product, jax.vmap(kernel_of), x_RI, stored, groups.sizes_E, forward=forward)
