"""Estimates the work of one device in one step from the config: matrix products, memory traffic and transfers.

The sizes of matrices come from the abstract model. Nothing is compiled, so a search can evaluate thousands of layouts.

Letters: D width, F feed-forward, N query heads, K key/value heads, H head dim, V vocabulary, T sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from maxlm.config.mesh import padded_vocabulary
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.model.fp8.mxfp8 import BLOCK
from maxlm.model.parameters import Kernel, block_kernels, layer_stacks, model_parameters, value_elements, weights
from maxlm.model.pipeline import bubble_fraction
from maxlm.planning.estimate.collectives import estimate_transfers
from maxlm.planning.estimate.experts import (
    activation_dim,
    dispatch_bytes,
    layers_on_device,
    rows_of,
    rows_per_token,
    whole_parameters,
)
from maxlm.planning.estimate.state_bytes import planned_state_bytes
from maxlm.planning.estimate.transfers import Transfer
from maxlm.training.flops import (
    GPU_KERNELS,
    RECOMPUTED,
    attended_positions,
    attention_forwards,
    attention_products,
    needs_mask,
)
from maxlm.training.optimizers.orthogonalization import ITERATIONS

# Stored bytes of one moment per parameter.
MOMENT_BYTES = {'float32': 4.0, 'bfloat16': 2.0, 'int8': 1.0}


class Work(NamedTuple):
    """Work of one device in one optimizer step, without the idle iterations of a pipeline.

    Attributes:
        flops: operations of matrix products outside of attention, including recomputation.
        fp8_flops: the part of `flops` in products of 8-bit floats.
        attention_flops: operations of the two products of attention and of their gradients.
        memory_bytes: bytes of device memory read and written outside of products, with one kernel per chain of
            elementwise operations. The programs that XLA compiles for GPUs differ; see
            `maxlm.planning.estimate.gpu_traffic`.
        host_bytes: bytes sent to host memory and back.
        idle: fraction of the step in which a pipeline stage waits for other stages.
        transfers: collectives.
    """

    flops: float
    fp8_flops: float
    attention_flops: float
    memory_bytes: float
    host_bytes: float
    idle: float
    transfers: list[Transfer]

    @property
    def all_flops(self) -> float:
        return self.flops + self.attention_flops


def estimate_work(config: Config, capability: tuple[int, int] | None = None) -> Work:
    """Estimates the work of a resolved config's step on each of its devices.

    Args:
        config: config of the run.
        capability: compute capability of the GPUs. None: other devices, or unknown.
    """
    mesh, tokens = config.mesh, tokens_per_device(config)
    is_gpu = capability is not None
    in_blocks = _block_flops(config, tokens, is_gpu=is_gpu)
    return Work(
        flops=in_blocks
        + _head_flops(config, tokens)
        + _muon_flops(config)
        + _teacher_flops(config, tokens, is_gpu=is_gpu),
        fp8_flops=0.0 if config.model.matmul_precision == 'default' else in_blocks,
        attention_flops=_attention_flops(config, tokens, capability),
        memory_bytes=_activation_bytes(config, tokens, capability)
        + _weight_bytes(config)
        + update_bytes(config)
        + teacher_bytes(config, capability),
        host_bytes=_host_bytes(config, tokens),
        idle=bubble_fraction(mesh.stage, mesh.num_pipeline_repeats, config.accumulation) if mesh.stage > 1 else 0.0,
        transfers=estimate_transfers(config),
    )


def tokens_per_device(config: Config) -> float:
    """Returns the number of tokens of a step that a device processes."""
    return config.train.global_batch_size * config.data.seq_len / (config.batch_shards * config.mesh.context)


def forward_passes(config: Config) -> float:
    """Returns the number of forward computations of a block's elementwise operations."""
    return 1 + (config.model.remat_policy != 'none') + (config.mesh.stage > 1)


def _block_flops(config: Config, tokens: float, *, is_gpu: bool) -> float:
    """Returns FLOPs of blocks: per parameter and token 2 forward, 4 backward, plus recomputation."""
    model, mesh = config.model, config.mesh
    total = 0.0
    for kind, layers in layers_on_device(config):
        kernels, rows = block_kernels(kind), rows_of(config, kind)
        per_token = multiplied_elements(config, kind, is_gpu=is_gpu)
        block = sum(per_token.values())
        of_experts = sum(size for name, size in per_token.items() if kernels[name].is_of_experts)
        # The weighted sum of the experts' outputs, and the mean probability of each expert.
        flops = 6.0 * block + 6 * kind.num_experts_per_token * kind.dim + 4 * kind.num_experts
        if of_experts and _is_expanded(kind) and not is_gpu:
            flops += 2 * of_experts * (rows.stored * kind.num_experts / mesh.expert / rows.multiplied - 1)
        # In a pipeline the stages are a batch dimension of every product, so dots_no_batch saves none of them.
        if model.remat_policy in RECOMPUTED or (model.remat_policy == 'dots_no_batch' and mesh.stage > 1):
            # The last product of a residual branch is not recomputed: at most its sum with the stream is needed.
            flops += 2 * (block - _last_elements(kind, kernels))
        elif model.remat_policy == 'dots_no_batch' or (
            model.remat_policy == 'dots' and not kind.expert_capacity_factor
        ):
            # Policies do not save the products of groups of rows.
            flops += 2 * of_experts
        if mesh.stage > 1:
            # A pipeline recomputes a complete chunk of layers from its input.
            flops += 2 * block
        total += flops * layers
    return tokens * (total / mesh.tensor + _module_flops(config))


def multiplied_elements(config: Config, kind: ModelConfig, *, is_gpu: bool) -> dict[str, float]:
    """Returns the elements of each kernel of a block that multiply a token, as a mean over the tokens of a device."""
    rows = rows_of(config, kind)
    # XLA expands a ragged product to products of all rows for every expert: on TPUs only the gradient of the kernels,
    # on GPUs all of them.
    expanded = rows.stored * kind.num_experts / config.mesh.expert
    # A kernel of experts multiplies the rows of all experts of a device.
    multiplied = rows_per_token(config, expanded if _is_expanded(kind) and is_gpu else rows.multiplied)
    return {
        name: kernel.inputs * kernel.outputs * (multiplied if kernel.is_of_experts else 1)
        for name, kernel in block_kernels(kind).items()
    }


def _is_expanded(kind: ModelConfig) -> bool:
    return kind.expert_matmul == 'ragged_dot' and not kind.expert_capacity_factor


def _last_elements(kind: ModelConfig, kernels: Mapping[str, Kernel]) -> int:
    """Returns the elements of the kernels whose products end a residual branch."""
    names = ('shared.down' if kind.num_experts else 'down', *(('out',) if kind.parallel_residual else ()))
    return sum(kernels[name].size for name in names if name in kernels)


def _module_flops(config: Config) -> float:
    """Returns FLOPs per token of the modules of multi-token prediction that their blocks do not contain.

    The projections are not split over `mesh.tensor`. If blocks are recomputed, the projections are too. The final norm
    then needs the complete output of the block. The mean probability of each expert is not used.
    """
    model = config.model
    flops = 12.0 * model.dim**2 - 4 * model.num_experts / config.mesh.tensor
    if model.remat_policy in RECOMPUTED:
        kind = layer_stacks(model)[-1]
        last = _last_elements(kind, block_kernels(kind)) + kind.num_experts_per_token * model.dim
        flops += 4 * model.dim**2 + 2 * last / config.mesh.tensor
    return model.mtp_depth * flops


def _teacher_flops(config: Config, tokens: float, *, is_gpu: bool) -> float:
    """Returns FLOPs of the teacher's forward pass outside of attention."""
    if config.teacher is None:
        return 0.0
    taught, per_token = config.of_teacher, 0.0
    for kind, layers in layers_on_device(taught):
        elements = sum(multiplied_elements(taught, kind, is_gpu=is_gpu).values())
        per_token += 2 * layers * (elements + kind.num_experts_per_token * kind.dim + kind.num_experts)
    head = 2 * taught.model.dim * _vocabulary(taught) / config.mesh.stage
    return tokens * (per_token / config.mesh.tensor + head)


def _head_flops(config: Config, tokens: float) -> float:
    """Returns FLOPs of the logits and both of their gradients (`cross_entropy`), shared by the pipeline stages."""
    losses = 1 + config.model.mtp_depth
    return 6 * tokens * losses * config.model.dim * _vocabulary(config) / config.mesh.stage


def _vocabulary(config: Config) -> float:
    """Returns the vocabulary size on a device, including padding."""
    return padded_vocabulary(config.model.num_outputs, config.mesh.tensor) / config.mesh.tensor


def _attention_flops(config: Config, tokens: float, capability: tuple[int, int] | None) -> float:
    model, mesh = config.model, config.mesh
    # About half of the products have the width of the keys, the others that of the values.
    per_position = attention_products(config) * model.num_heads * (model.head_dim + model.value_dim)
    per_layer = per_position * attended_positions(config, capability)
    flops = tokens * per_layer * (model.num_layers + model.mtp_depth)
    if config.teacher is not None:
        teacher, positions = config.teacher, attended_positions(config.of_teacher, capability)
        # The products of queries and keys, and of weights and values.
        per_position = 2 * teacher.num_heads * (teacher.head_dim + teacher.value_dim)
        flops += tokens * per_position * positions * teacher.num_layers
    return flops / (mesh.stage * mesh.tensor)


def _muon_flops(config: Config) -> float:
    """Returns FLOPs of Newton–Schulz, for matrices spread over devices by layer.

    Each iteration computes x xᵀ, its square, and their sum times x.
    """
    if config.optimizer.name != 'muon':
        return 0.0
    mesh = config.mesh
    parts = mesh.data * mesh.fsdp * mesh.expert * mesh.context * mesh.tensor
    flops = 0.0
    for weight in weights(config.model):
        if weight.kind != 'matrix':
            continue
        narrow, wide = sorted(weight.matrix_shape)
        layers = weight.shape[0] / mesh.stage
        # The experts of a layer are spread over devices, or the layers if there are no experts.
        experts = config.model.num_experts
        matrices = math.ceil(experts / parts) * layers if weight.is_of_experts else math.ceil(layers / parts)
        flops += ITERATIONS * (4 * narrow**2 * wide + 2 * narrow**3) * matrices
    return flops


def _activation_bytes(config: Config, tokens: float, capability: tuple[int, int] | None) -> float:
    """Returns the bytes of activations read and written between products, with one kernel per elementwise chain.

    Forward, in elements per token and block: a norm reads the stream for its sums and again for its result, which it
    writes (3 D). A residual addition reads two arrays and writes one (3 D). The rotation reads and writes queries and
    keys. The activation reads one or two arrays of F and writes one. Attention reads q, k, v and writes its output. The
    gradient of each reads its inputs and the gradient, and writes: twice the forward amount.
    """
    model, width = config.model, jnp.dtype(config.model.dtype).itemsize
    passes = 2 + forward_passes(config)
    beside = score_bytes(config, capability) + quantization_bytes(config)
    blocks = sum(layers * (_forward_bytes(config, kind) * passes + beside) for kind, layers in layers_on_device(config))
    # Logits: written in float32; read for their maximum, for the sum and for the gradient; the gradient is written once
    #     and read by two products.
    logits = _vocabulary(config) * (16 + 3 * width) / config.mesh.stage
    # The embedding: a row is read and written; its gradient is added to the table's in float32.
    lookup = model.dim * (2 * width + 12)
    # Value embeddings also: their sum with the values reads two arrays and writes one.
    lookups = value_elements(model) * (2 * width + 12 + 3 * width * passes) / (config.mesh.tensor * config.mesh.stage)
    # A module of multi-token prediction has three norms, and copies both inputs of its projection.
    module = width * (3 * 3 + 2 * 2) * model.dim * passes
    return tokens * (blocks + lookups + (1 + model.mtp_depth) * (logits + lookup) + model.mtp_depth * module)


def teacher_bytes(config: Config, capability: tuple[int, int] | None) -> float:
    """Returns the bytes that the forward pass of the teacher reads and writes in a step, outside of products."""
    if config.teacher is None:
        return 0.0
    taught, mesh = config.of_teacher, config.mesh
    width, scores = jnp.dtype(config.teacher.dtype).itemsize, score_bytes(taught, capability, is_forward=True)
    blocks = sum(layers * (_forward_bytes(taught, kind) + scores) for kind, layers in layers_on_device(taught))
    # Logits are written in float32, and read for their maximum, for the sum and for the divergence.
    logits = 16 * _vocabulary(taught) / mesh.stage
    per_token = blocks + logits + 2 * width * taught.model.dim
    # Sharded parameters are gathered; below ZeRO stage 3, once per step.
    is_sharded = mesh.fsdp * mesh.expert * mesh.context > 1
    times = is_sharded * (config.accumulation if mesh.zero_stage == 3 else 1)
    return tokens_per_device(config) * per_token + times * 2 * width * whole_parameters(taught)


def _forward_bytes(config: Config, kind: ModelConfig) -> float:
    """Returns the bytes per token that the forward pass of a block reads and writes between its products."""
    model, mesh = config.model, config.mesh
    heads, kv_heads = model.num_heads * model.head_dim / mesh.tensor, model.num_kv_heads * model.head_dim / mesh.tensor
    stream = (3 * (2 if model.norm_placement == 'both' else 1) + 3) * 2 * model.dim
    attention = 2 * heads + 2 * kv_heads
    rotation = 2 * (heads + kv_heads) if model.position_embedding == 'rotary' else 0
    head_norms = 3 * (heads + kv_heads) if model.qk_norm else 0
    activation = (3 if model.activation in GATED_ACTIVATIONS else 2) * activation_dim(config, kind)
    elements = stream + attention + rotation + head_norms + activation
    return jnp.dtype(model.dtype).itemsize * elements + rows_per_token(config, dispatch_bytes(config, kind))


def quantization_bytes(config: Config) -> float:
    """Returns the bytes per token and block of the quantization to FP8.

    Inputs of products and gradients of their outputs are read for their maximum, read again and written in 8 bits. A
    kernel (`model.fp8_kernel`) reads them once and writes two copies, and the backward pass of the activation writes
    its results in 8 bits only. For MXFP8, arrays are read for each of two products. For one of them, the array is
    transposed before. The kernels are quantized in each micro-batch, also in two directions. The maximum of a block is
    written and read twice in float32.
    """
    model, tensor = config.model, config.mesh.tensor
    if model.matmul_precision == 'default':
        return 0.0
    heads, kv_heads = (number * model.head_dim / tensor for number in (model.num_heads, model.num_kv_heads))
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    inputs = 2 * model.dim + heads + model.ffn_dim / tensor
    outputs = 2 * model.dim + heads + 2 * kv_heads + gates * model.ffn_dim / tensor
    width = jnp.dtype(model.dtype).itemsize
    if model.matmul_precision == 'mxfp8':
        written = 1 + (3 * 4 + 1) / BLOCK
        rows, columns = 2 * width + written, 4 * width + written
        size = sum(kernel.size for kernel in block_kernels(model).values() if not kernel.is_of_experts)
        kernels = size / (config.train.per_device_batch_size * config.data.seq_len)
        forward = inputs * rows + kernels * columns
        return forward * forward_passes(config) + inputs * columns + outputs * (rows + columns) + kernels * rows
    if model.fp8_kernel == 'pallas':
        return (width + 2) * (inputs * forward_passes(config) + outputs - gates * model.ffn_dim)
    return (2 * width + 1) * (inputs * forward_passes(config) + outputs)


def score_bytes(config: Config, capability: tuple[int, int] | None, *, is_forward: bool = False) -> float:
    """Returns the bytes per token and block of scores in memory. `is_forward`: without a backward pass."""
    model, mesh = config.model, config.mesh
    width = jnp.dtype(model.dtype).itemsize
    scores = model.num_heads / mesh.tensor * attended_positions(config, capability)
    if model.attention == 'splash':
        return 0.0
    if mesh.context == 1 and model.attention in GPU_KERNELS:
        # The mask, which is added to the scores of each head, forward and backward.
        return (1 if is_forward else 2) * width * scores if needs_mask(config, capability) else 0.0
    # Forward: scores are written in float32 and read for maximum and sum; the weights are written and read. Backward:
    #     scores and the gradients of weights are written in float32 and read. They give the weights, which one product
    #     reads, and the gradients of scores, which two products read.
    forward, backward = 12 + 2 * width, 16 + 5 * width
    return scores * (forward if is_forward else forward * attention_forwards(config) + backward)


def _weight_bytes(config: Config) -> float:
    """Returns the bytes of casting and gathering parameters per micro-batch, and of accumulating their gradients."""
    model, mesh = config.model, config.mesh
    width = jnp.dtype(model.dtype).itemsize
    saved_over = mesh.fsdp * mesh.expert * mesh.context
    all_weights = whole_parameters(config)
    shard = model_parameters(model) / (mesh.stage * mesh.tensor * saved_over)
    saved = shard if mesh.zero_stage == 3 else all_weights
    summed = shard if mesh.zero_stage >= 2 else all_weights
    # Forward and backward: read in float32, written in the compute dtype, and written completely after a gather.
    passes = 2 * (saved * (4 + width) + all_weights * width * (saved_over > 1 and mesh.zero_stage == 3))
    # A gradient is written completely, read for its sum over devices, stored in its stack and added to the totals.
    gradients = all_weights * 2 * width + summed * (4 + 12)
    # The gradient of the head is summed in float32 over the chunks of the loss.
    chunks = math.ceil(config.data.seq_len / mesh.context / config.loss_chunk)
    sums = (1 + model.mtp_depth) * (chunks - 1) * 8 * model.dim * _vocabulary(config) / mesh.stage
    return config.accumulation * (passes + gradients + sums)


def update_bytes(config: Config) -> float:
    """Returns the bytes of the update: one pass that reads and writes each array, and the passes before it."""
    model, mesh, optimizer = config.model, config.mesh, config.optimizer
    parts = mesh.stage * mesh.tensor * mesh.fsdp * mesh.expert * mesh.context
    matrices = sum(weight.size for weight in weights(model) if weight.kind == 'matrix')
    moment = 2 * MOMENT_BYTES[optimizer.moment_dtype]
    # The gradient: squared for its norm, and used. The parameter: used, written, and its norm.
    per_parameter = 8 + 12 + (8 if optimizer.ema_decay else 0)
    moments = model_parameters(model) * 2 * moment
    if optimizer.is_function:
        moments = 2 * planned_state_bytes(config).moments * parts
    orthogonal = 0.0
    if optimizer.name == 'muon':
        moments -= matrices * moment
        # Each iteration has three products, whose results are scaled and added.
        spread = parts * mesh.data
        orthogonal = ITERATIONS * 6 * jnp.dtype(model.dtype).itemsize * matrices / spread
    return (model_parameters(model) * per_parameter + moments) / parts + orthogonal


def _host_bytes(config: Config, tokens: float) -> float:
    model, mesh, optimizer = config.model, config.mesh, config.optimizer
    saved = model_parameters(model) / (mesh.stage * mesh.tensor * mesh.fsdp * mesh.expert * mesh.context)
    total = 0.0
    if mesh.host_offload != 'none':
        # Moments are copied in and out; a moving average is a parameter.
        total += saved * 2 * 2 * MOMENT_BYTES[optimizer.moment_dtype]
    if mesh.host_offload == 'all':
        # Parameters are copied in for forward, backward and update, and copied out after the update.
        total += saved * 4 * (2 * config.accumulation + 2 + (2 if optimizer.ema_decay else 0))
    if model.remat_policy == 'offload':
        total += tokens * model.dim * jnp.dtype(model.dtype).itemsize * 2 * model.num_layers / mesh.stage
    return total
