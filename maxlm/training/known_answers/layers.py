"""Known answers of the other layers: matrix products, norm and activation.

Shapes: R rows, D dim, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.model.fp8 import mxfp8
from maxlm.model.fp8 import products as fp8
from maxlm.model.layers.linear import Linear
from maxlm.model.layers.mlp import ACTIVATIONS, recomputed
from maxlm.model.layers.norm import NormKind, normalize
from maxlm.model.layers.weight_only_quantization import Codes, dequantize, weights_of
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.known_answers.answer import OTHER_VERSIONS, KnownAnswer, floats, normal, with_gradients

# Bits of the sums in which GPUs accumulate 8-bit floats, and the number of products after which a sum is rounded down:
# DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2.
FP8_SUM_BITS, FP8_SUM_LENGTH = 14, 32


def product_answer(model: ModelConfig, rows: int, inputs: int, outputs: int) -> KnownAnswer:
    """Returns a product with a kernel as the model stores and multiplies it: float, 8-bit floats, or quantized.

    The formula multiplies the values of the codes, so that errors of the quantization do not count.
    """
    rng = np.random.default_rng(0)
    do_RO, x_RI = (normal(rng, (rows, size), model.dtype) for size in (outputs, inputs))
    linear = Linear(
        (inputs,),
        (outputs,),
        in_axes=('embed',),
        out_axes=('ffn',),
        init=jax.nn.initializers.normal(inputs**-0.5),
        use_bias=False,
        matmul=model.matmul_precision,
        partitioning=SINGLE_DEVICE,
        rngs=nnx.Rngs(0),
    )
    weights = weights_of(model)
    if weights is not None:
        linear.quantize_kernel(weights)
    graph, state = nnx.split(linear)
    # Codes have no gradient.
    names = ('product', 'gradient of the inputs', 'gradient of the kernel')[: 2 if weights else 3]
    is_fp8, is_mxfp8 = (model.matmul_precision == kind for kind in ('fp8', 'mxfp8'))

    def run(do_RO: jax.Array, x_RI: jax.Array, state: nnx.State[Any, Any]) -> tuple[jax.Array, ...]:
        if weights is not None:
            return with_gradients(nnx.merge(graph, state), do_RO, x_RI)
        y_RO, *gradients = with_gradients(lambda x, state: nnx.merge(graph, state)(x), do_RO, x_RI, state)
        return y_RO, gradients[0], *jax.tree.leaves(gradients[1])

    def exact(do_RO: jax.Array, x_RI: jax.Array, state: nnx.State[Any, Any]) -> tuple[jax.Array, ...]:
        if weights is None:
            (kernel_IO,) = jax.tree.leaves(state)
            kernel_IO = _rounded(kernel_IO, fp8.E4M3) if is_fp8 else kernel_IO.astype(x_RI.dtype)
        else:
            stored = nnx.merge(graph, state)
            codes = Codes(stored.kernel_codes[...], stored.kernel_scales[...])
            kernel_IO = dequantize(codes, 1, weights.kind, x_RI.dtype)
        if is_fp8:
            do_RO, x_RI = _rounded(do_RO, fp8.E5M2), _rounded(x_RI, fp8.E4M3)
        if is_mxfp8:
            return _exact_in_mxfp8(do_RO, x_RI, kernel_IO)
        do_RO, x_RI, kernel_IO = floats(do_RO, x_RI, kernel_IO)
        return (x_RI @ kernel_IO, do_RO @ kernel_IO.T, x_RI.T @ do_RO)[: len(names)]

    is_8_bits = is_fp8 or is_mxfp8
    stored_as = model.weight_quantization if weights else model.matmul_precision if is_8_bits else model.dtype
    remedy = 'set model.matmul_precision=default' if is_8_bits else OTHER_VERSIONS
    if weights:
        remedy = 'choose another weight quantization, or none'
    shape = f'{rows:,} × {inputs:,} × {outputs:,}'
    # The gradients accumulate in float32.
    tolerance = inputs / FP8_SUM_LENGTH * 2.0**-FP8_SUM_BITS if is_8_bits else 0.0
    kernel = f'product in {stored_as}'
    return KnownAnswer(kernel, shape, run, exact, (do_RO, x_RI, state), names, model.dtype, remedy, tolerance)


def norm_answer(model: ModelConfig, rows: int) -> KnownAnswer:
    """Returns the norm over the width of the model, and its gradients."""
    rng, D = np.random.default_rng(0), model.dim
    do_RD, x_RD = (normal(rng, (rows, D), model.dtype) for _ in range(2))
    scale_D, bias_D = (rng.standard_normal(D, np.float32) for _ in range(2))
    kind = NormKind(model.norm == 'layernorm', model.norm_epsilon, model.scan_layers)

    def run(do_RD: jax.Array, x_RD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> tuple[jax.Array, ...]:
        return with_gradients(lambda *inputs: normalize(*inputs, kind), do_RD, x_RD, scale_D, bias_D)

    def formula(x_RD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
        x_RD = x_RD - x_RD.mean(-1, keepdims=True) if kind.is_centered else x_RD
        mean_square_R1 = jnp.square(x_RD).mean(-1, keepdims=True)
        return x_RD / jnp.sqrt(mean_square_R1 + kind.epsilon) * scale_D[None] + bias_D[None]

    def exact(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return with_gradients(formula, *floats(*inputs))

    names = ('output', 'gradient of the input', 'gradient of the scale', 'gradient of the bias')
    inputs = (do_RD, x_RD, scale_D, bias_D)
    return KnownAnswer(model.norm, f'{rows:,} × {D:,}', run, exact, inputs, names, model.dtype, OTHER_VERSIONS)


def activation_answer(model: ModelConfig, rows: int, width: int) -> KnownAnswer:
    """Returns the activation of the feed-forward layer, and its gradients."""
    rng = np.random.default_rng(0)
    count = 3 if model.activation in GATED_ACTIVATIONS else 2
    arrays = [normal(rng, (rows, width), model.dtype) for _ in range(count)]
    function = ACTIVATIONS[model.activation]
    run_function = recomputed(function, in_loop=model.scan_layers)

    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return with_gradients(run_function, *inputs)

    def exact(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return with_gradients(function, *floats(*inputs))

    names = ('output', *(f'gradient of input {number}' for number in range(1, count)))
    shape = f'{rows:,} × {width:,}'
    return KnownAnswer(model.activation, shape, run, exact, tuple(arrays), names, model.dtype, OTHER_VERSIONS)


def _exact_in_mxfp8(do_RO: jax.Array, x_RI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the products of the values in MXFP8, whose blocks are along the contracted axes."""

    def product(a_RK: jax.Array, b_SK: jax.Array) -> jax.Array:
        return mxfp8.rounded(a_RK) @ mxfp8.rounded(b_SK).T

    return product(x_RI, kernel_IO.T), product(do_RO, kernel_IO), product(x_RI.T, do_RO.T)


def _rounded(x: jax.Array, kind: type) -> jax.Array:
    """Returns the values of an array in 8-bit floats, in float32."""
    codes = fp8.quantize(x, kind)
    return jax.lax.bitcast_convert_type(codes.bits, kind).astype(jnp.float32) * codes.scale
