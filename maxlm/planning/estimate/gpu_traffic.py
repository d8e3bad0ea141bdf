"""Estimates the memory traffic of a training step that XLA compiles for a GPU.

The coefficients are fitted to compiled programs (`python -m benchmarks.plan_programs --fit`), because the traffic
depends on which operations XLA fuses. `maxlm.planning.compiled.traffic` counts the traffic of a compiled program.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.model.attention.cudnn import DOCUMENTS_CAPABILITY
from maxlm.model.parameters import model_parameters
from maxlm.planning.estimate.experts import (
    activation_dim,
    dispatch_bytes,
    layers_on_device,
    num_modules,
    rows_per_token,
    whole_parameters,
)
from maxlm.planning.estimate.work import (
    forward_passes,
    quantization_bytes,
    score_bytes,
    teacher_bytes,
    tokens_per_device,
    update_bytes,
)
from maxlm.training.flops import GPU_KERNELS

# Bytes per element of a sum in float32 that is read and written.
SUM = 8
# Arrays of the inner width of experts that the activation reads and writes, in a forward pass and in the backward pass.
# The products of experts are kernels, so XLA cannot fuse the activation with them. Read off programs for H100.
EXPERT_ACTIVATION, EXPERT_ACTIVATION_BACKWARD = 3, 4
# Arrays of the model width that a layer reads and writes, forward and backward. SCALED: to scale the stream. ADDED: to
# add a multiple of the first input, whose gradient is a sum over layers. KEPT: to keep the stream of one layer in a
# loop. Counted from the operations.
SCALED, ADDED, KEPT = 5, 4, 7
# Arrays of the model width that `model.norm_kernel=pallas` saves for each input of a residual branch in unrolled layers
# without rematerialization. From two programs of configs/1b.py, benchmarks/results/norm_kernel_programs.json.
NORM_KERNEL = 2.9


class Features(NamedTuple):
    """Sizes per token and block that the traffic of activations is proportional to.

    Attributes:
        stream: inputs of residual branches.
        feed_forward: inputs and outputs of the activation.
        attention: queries, keys and values, again if they are rotated, and again if they are normalized.
    """

    stream: float
    feed_forward: float
    attention: float


# Fitted elements that are read and written, per feature, by (model.scan_layers, values that rematerialization saves).
# With 'inputs', all coefficients of earlier programs are multiplied by one factor, because few present ones exist.
COEFFICIENTS: dict[tuple[bool, str], Features] = {
    (False, 'all'): Features(2.1, 3.15, 4.64),
    (False, 'products'): Features(0.0, 8.24, 3.34),
    (False, 'inputs'): Features(0.0, 6.89, 2.25),
    (True, 'all'): Features(1.49, 11.56, 13.86),
    (True, 'products'): Features(0.0, 15.83, 0.0),
    (True, 'inputs'): Features(37.8, 0.0, 4.3),
}
SAVED = {'none': 'all', 'dots': 'products', 'dots_no_batch': 'products', 'full': 'inputs', 'offload': 'inputs'}


def estimate_gpu_traffic(config: Config) -> float:
    """Estimates the bytes that a GPU reads and writes in a step, outside of products and attention kernels.

    Args:
        config: resolved config.
    """
    model = config.model
    width = jnp.dtype(model.dtype).itemsize
    # A pipeline recomputes a complete chunk of layers.
    passes = 2 if config.mesh.stage > 1 else 1
    beside = quantization_bytes(config) + _unfused_attention_bytes(config)

    def elements(kind: ModelConfig, saved: str) -> float:
        coefficients = COEFFICIENTS[model.scan_layers, saved]
        found = sum(factor * size for factor, size in zip(coefficients, features(config, kind), strict=True))
        scaled, added = model.residual_scale or model.embedding_residual, model.embedding_residual
        kept = model.backout_layer >= 0 and model.scan_layers
        if model.norm_kernel == 'pallas' and not model.scan_layers and saved == 'all':
            found -= NORM_KERNEL * features(config, kind).stream
        found += model.dim * (SCALED * scaled + ADDED * added + KEPT * kept)
        if kind.num_experts and not coefficients.feed_forward:
            arrays = EXPERT_ACTIVATION * forward_passes(config) + EXPERT_ACTIVATION_BACKWARD
            found += arrays * activation_dim(config, kind)
        return found

    total = 0.0
    for kind, layers in layers_on_device(config):
        modules = num_modules(config, kind)
        of_layers = passes * elements(kind, SAVED[model.remat_policy]) * (layers - modules)
        # XLA recomputes a block outside of a loop with kernels of its own.
        of_modules = elements(kind, 'all') * (2 + forward_passes(config)) / 3 * modules
        rows = rows_per_token(config, dispatch_bytes(config, kind)) * (2 + forward_passes(config))
        total += (width * (of_layers + of_modules) + (rows + beside) * layers) * tokens_per_device(config)
    # Masks of fused kernels do not count, as for the layers of the model.
    return total + fixed_bytes(config) + teacher_bytes(config, DOCUMENTS_CAPABILITY)


def features(config: Config, kind: ModelConfig | None = None) -> Features:
    """Returns the sizes per token and block, on one device, for a kind of layer (default: the model's)."""
    model, tensor = config.model, config.mesh.tensor
    kv = model.num_kv_heads * model.head_dim / tensor
    heads = model.num_heads * model.head_dim / tensor
    attention = heads + 2 * kv
    rotated = heads + kv if model.position_embedding == 'rotary' else 0
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    return Features(
        (1 if model.parallel_residual else 3 if model.norm_placement == 'both' else 2) * model.dim,
        (gates + 1) * activation_dim(config, kind or model),
        attention + rotated + (attention if model.qk_norm else 0),
    )


def fixed_bytes(config: Config) -> float:
    """Returns the bytes of embeddings, gradient sums, loss and update."""
    return _embedding_bytes(config) + _gradient_bytes(config) + _loss_bytes(config) + update_bytes(config)


def _embedding_bytes(config: Config) -> float:
    """Returns the bytes of rows of embeddings: read and written, their gradients read and added in float32."""
    model = config.model
    num_tables = 2 if model.position_embedding == 'learned' else 1
    per_element = 3 * jnp.dtype(model.dtype).itemsize + 4
    return num_tables * per_element * model.dim * tokens_per_device(config) / config.mesh.stage


def _gradient_bytes(config: Config) -> float:
    """Returns the bytes of gradient sums and of the kernels of unrolled layers.

    Each micro-batch reads the gradients, and reads and writes their sums. The gradient of the embedding is added to
    zeros. Once per step, the kernels of each layer are copied out of the stacked arrays.
    """
    mesh, model = config.mesh, config.model
    width = jnp.dtype(model.dtype).itemsize
    shards = mesh.fsdp * mesh.expert * mesh.context
    params = whole_parameters(config)
    shard = model_parameters(model) / (mesh.stage * mesh.tensor * shards)
    summed = shard if mesh.zero_stage >= 2 else params
    copied = 0.0 if model.scan_layers or (mesh.zero_stage == 3 and shards > 1) else 2 * width * params
    return config.accumulation * ((width + SUM) * summed + 4 * _table(config)) + copied


def _loss_bytes(config: Config) -> float:
    """Returns the bytes of the losses outside of products.

    Logits in float32 are read for their maximum and sum, and again for their gradient, which is written in the compute
    dtype. Each micro-batch casts the head's kernel and writes zeros, to which products add the kernel's gradient.
    cuBLAS needs rows of 16 bytes. For another vocabulary size, each chunk copies the kernel, and the sum of its
    gradients before and after the product.
    """
    model = config.model
    width = jnp.dtype(model.dtype).itemsize
    tokens = tokens_per_device(config)
    outputs = model.num_outputs / config.mesh.tensor
    chunks = math.ceil(tokens / config.accumulation / config.train.loss_chunk_tokens)
    padded = 0 if outputs % 8 == 0 else chunks * (2 * width + 2 * SUM)
    logits = tokens * outputs * (8 + width)
    of_head = config.accumulation * outputs * model.dim * (4 + width + 4 + padded)
    return (1 + model.mtp_depth) * (logits + of_head) / config.mesh.stage


def _table(config: Config) -> float:
    """Returns the elements of a table of the vocabulary on a device."""
    return config.model.vocab_size * config.model.dim / config.mesh.tensor


def _unfused_attention_bytes(config: Config) -> float:
    """Returns the bytes per token and block of scores, which only a fused kernel does not write."""
    is_fused = config.model.attention in GPU_KERNELS and config.mesh.context == 1
    return 0.0 if is_fused else score_bytes(config, None)
