"""Products of inputs in 8 bits with kernels in 8 or 4 bits, for inference on a CPU (W8A8 and W4A8).

Each row of an input is rounded in blocks of 32 inputs, with the scale max |x| / 127 of a block, as in llama.cpp's Q8_0.
The sum of the products of a block is an exact integer. `maxlm/runtime/cpu_kernels.cc` computes the product of a packed
kernel; `round_rows` and a product of floats give the same values up to the rounding of float32.

Shapes: M rows, I inputs, O outputs, G groups of inputs that share a scale of the kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.model.layers.weight_only_quantization import (
    Codes,
    group_size,
    quantized_kernels,
    weights_of,
)

# Number of inputs that share a scale, and number of outputs of a panel of a packed kernel.
BLOCK, PANEL = 32, 16
# Functions of the compiled library by kind of the codes.
TARGETS = {'int8': 'maxlm_int8_product', 'int4': 'maxlm_int4_product'}


def check_model(model: ModelConfig) -> None:
    """Raises InputError if the kernels of a model, which are quantized, have no products with rounded inputs."""
    weights = weights_of(model)
    assert weights is not None
    if weights.kind not in TARGETS:
        raise InputError(f'inputs in 8 bits need kernels in int8 or int4, not {weights.kind}; use --quantize=w8a8')
    if model.num_experts or model.kv_lora_rank:
        name = 'experts' if model.num_experts else 'latent attention'
        raise InputError(f'inputs in 8 bits do not support models with {name}; use --quantize={weights.kind}')
    for name in quantized_kernels(model):
        inputs = {'out': model.head_dim, 'down': model.ffn_dim}.get(name.split('.')[-2], model.dim)
        size = group_size(inputs, weights.group)
        if size % BLOCK:
            raise InputError(
                f'inputs in 8 bits need scales for multiples of {BLOCK} inputs, but {size} inputs of {name} share a '
                f'scale; use --quantize={weights.kind}' + (' or w8a8' if weights.kind == 'int4' else '')
            )


def round_rows(x_MI: jax.Array) -> jax.Array:
    """Returns rows with values rounded to 8 bits, in the dtype of x. NaN and infinity make their block NaN.

    A block whose largest |x| is below 4e-37, so that 127 / max |x| is infinite, becomes 0.
    """
    M, num_inputs = x_MI.shape
    x_MGB = jnp.pad(x_MI.astype(jnp.float32), ((0, 0), (0, -num_inputs % BLOCK))).reshape(M, -1, BLOCK)
    largest = jnp.max(jnp.abs(x_MGB), axis=2, keepdims=True)
    inverse = jnp.where(jnp.isfinite(127 / largest), 127 / largest, 0)
    rounded = jnp.round(x_MGB * inverse) * (largest / 127)
    return jnp.where(jnp.isfinite(largest), rounded, jnp.nan).reshape(M, -1)[:, :num_inputs].astype(x_MI.dtype)


def product(x_MI: jax.Array, packed: Codes, num_outputs: int, kind: str) -> jax.Array:
    """Returns the product of rounded rows with a packed kernel, [M, O] in the dtype of x.

    `register_cpu_kernels` must have returned True.

    Args:
        x_MI: rows.
        packed: packed codes and scales (`maxlm.model.packed_kernels`).
        num_outputs: O.
        kind: kind of the codes.
    """
    call = jax.ffi.ffi_call(TARGETS[kind], jax.ShapeDtypeStruct((len(x_MI), num_outputs), jnp.float32))
    y_MO: jax.Array = call(x_MI.astype(jnp.float32), *packed)
    return y_MO.astype(x_MI.dtype)


class PackedHead(nnx.Module):
    """Kernel of the logits in int8, packed by `maxlm.model.packed_kernels.pack_table`."""

    def __init__(self, vocab_size: int, dim: int):
        self.vocab_size = vocab_size
        panels, inputs = -(-vocab_size // PANEL), -(-dim // BLOCK) * BLOCK
        self.codes = nnx.Param(jax.ShapeDtypeStruct((panels, inputs // 4, PANEL, 4), jnp.uint8))
        self.scales = nnx.Param(jax.ShapeDtypeStruct((panels, 1, PANEL), jnp.float32))

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        """Returns the logits of hidden states, [B, T, V] in float32."""
        rows_MD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]).astype(jnp.float32)
        logits_MV = product(rows_MD, Codes(self.codes[...], self.scales[...]), self.vocab_size, 'int8')
        return logits_MV.reshape(*hidden_BTD.shape[:-1], self.vocab_size)
