"""Matrix products in MXFP8 (Rouhani et al. 2023, "OCP Microscaling Formats (MX) Specification", version 1.0).

32 neighbors along the contracted axis share a scale, a power of two. All numbers are rounded to E4M3, gradients
included, and scales are rounded up so that no element is clipped (Mishra et al. 2025, "Recipes for Pre-training LLMs
with MXFP8"). The three products of a projection contract different axes, so each of them quantizes both of its factors.

GPUs multiply with `jax.nn.scaled_matmul`, which is cuDNN's kernel on Blackwell. CPUs emulate it slowly.

Shapes: M rows, I inputs, O outputs, K contracted axis, C blocks of K.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from maxlm.model.fp8.products import E4M3, MANTISSA

# Number of elements with a common scale.
BLOCK = 32
# Bits of the exponent of a float32 that is not finite.
NOT_FINITE = 255


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x_MI: jax.Array, kernel_IO: jax.Array, platform: str) -> jax.Array:
    """Returns x · kernel, [M, O], in the dtype of x. Both products of the backward pass also use MXFP8.

    Args:
        x_MI: inputs; I must be a multiple of BLOCK, and M and O too for the backward pass.
        kernel_IO: kernel in the dtype of x.
        platform: platform of the devices.
    """
    return _multiply(x_MI, _transposed(kernel_IO), platform)


def _forward(x_MI: jax.Array, kernel_IO: jax.Array, platform: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x_MI, kernel_IO, platform), (x_MI, kernel_IO)


def _backward(platform: str, kept: tuple[jax.Array, jax.Array], of_y_MO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_MI, kernel_IO = kept
    return _multiply(of_y_MO, kernel_IO, platform), _multiply(_transposed(x_MI), _transposed(of_y_MO), platform)


product.defvjp(_forward, _backward)


def quantize(x_MK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes [M, K] in E4M3, and the biased exponents of the scales, uint8 [M, C].

    In a block with an element that is not finite, the scale is NaN.
    """
    blocks_MCB = x_MK.astype(jnp.float32).reshape(len(x_MK), -1, BLOCK)
    largest_MC = jnp.abs(blocks_MCB).max(-1) / float(jnp.finfo(E4M3).max)
    # The exponent of the lowest power of two that is at least `largest`.
    exponent_MC = (jax.lax.bitcast_convert_type(largest_MC, jnp.uint32) + MANTISSA) >> 23
    # Devices may round numbers below the smallest exponent, 1, to 0.
    exponent_MC = jnp.clip(exponent_MC, 1, NOT_FINITE)
    # 1 / scale, and 0 if the block is not finite.
    inverse_MC = jax.lax.bitcast_convert_type(jnp.maximum(NOT_FINITE - 1, exponent_MC) - exponent_MC << 23, jnp.float32)
    codes_MCB = (blocks_MCB * inverse_MC[..., None]).astype(E4M3)
    return codes_MCB.reshape(x_MK.shape), exponent_MC.astype(jnp.uint8)


def rounded(x_MK: jax.Array) -> jax.Array:
    """Returns the values of an array in MXFP8, with blocks along its last axis, in float32."""
    codes_MK, exponent_MC = quantize(x_MK)
    scale_MC = jax.lax.bitcast_convert_type(exponent_MC.astype(jnp.uint32) << 23, jnp.float32)
    scale_MC = jnp.where(exponent_MC == NOT_FINITE, jnp.nan, scale_MC)
    return codes_MK.astype(jnp.float32) * jnp.repeat(scale_MC, BLOCK, axis=-1)


def _multiply(a_MK: jax.Array, b_OK: jax.Array, platform: str) -> jax.Array:
    """Returns a · bᵀ, [M, O], in the dtype of a."""
    if platform != 'gpu':
        return jnp.dot(rounded(a_MK), rounded(b_OK).T, precision='highest').astype(a_MK.dtype)
    (a_codes, a_scale), (b_codes, b_scale) = (_with_scales(x_MK) for x_MK in (a_MK, b_OK))
    y: jax.Array = jax.nn.scaled_matmul(a_codes, b_codes, a_scale, b_scale, preferred_element_type=a_MK.dtype)
    return y[0]


def _transposed(x_KM: jax.Array) -> jax.Array:
    """Returns the transposed array. Without the barrier, XLA for GPUs transposes it after the conversion to float32."""
    return jax.lax.optimization_barrier(x_KM.T)


def _with_scales(x_MK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes [1, M, K] and the scales [1, M, C] as `jax.nn.scaled_matmul` takes them."""
    codes_MK, exponent_MC = quantize(x_MK)
    return codes_MK[None], jax.lax.bitcast_convert_type(exponent_MC, jnp.float8_e8m0fnu)[None]
