"""Estimates the work of one device in one step from the config: matrix products, memory traffic and transfers.

Nothing is traced or compiled, so a search can evaluate thousands of layouts.

Letters: D width, F feed-forward, N query heads, K key/value heads, H head dim, V vocabulary, T sequence length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from maxlm.config.families import GATED_ACTIVATIONS
from maxlm.config.mesh import padded_vocabulary
from maxlm.config.schema import Config
from maxlm.model.attention.chunked import query_ranges
from maxlm.model.attention.splash import block_size, num_visible_blocks
from maxlm.model.layers.masks import layer_windows
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
from maxlm.planning.estimate.flops import teacher_flops
from maxlm.planning.estimate.parameters import block_kernels, layer_stacks, model_parameters, weights
from maxlm.planning.estimate.transfers import Transfer
from maxlm.training.optimizers.muon import ITERATIONS

# Stored bytes of one moment per parameter.
MOMENT_BYTES = {'float32': 4.0, 'bfloat16': 2.0, 'int8': 1.0}
# Values of model.remat_policy that recompute a block from its input.
RECOMPUTED = ('full', 'offload')
# Minimum compute capability of GPUs whose cuDNN accepts document boundaries: Hopper.
DOCUMENTS_CAPABILITY = (9, 0)


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
    in_blocks = _block_flops(config, tokens, is_gpu=capability is not None)
    return Work(
        flops=in_blocks + _head_flops(config, tokens) + _muon_flops(config) + _teacher_flops(config, tokens),
        fp8_flops=in_blocks if config.model.matmul_precision == 'fp8' else 0.0,
        attention_flops=_attention_flops(config, tokens, capability),
        memory_bytes=_activation_bytes(config, tokens, capability) + _weight_bytes(config) + update_bytes(config),
        host_bytes=_host_bytes(config, tokens),
        idle=bubble_fraction(mesh.stage, mesh.num_pipeline_repeats, config.accumulation) if mesh.stage > 1 else 0.0,
        transfers=estimate_transfers(config),
    )


def tokens_per_device(config: Config) -> float:
    """Returns the number of tokens of a step that a device processes."""
    return config.train.global_batch_size * config.data.seq_len / (config.batch_shards * config.mesh.context)


def needs_mask(config: Config, capability: tuple[int, int] | None) -> bool:
    """Returns True if a fused kernel takes documents as a mask array; see `maxlm.model.attention.cudnn`."""
    kernel_masks_documents = capability is not None and capability >= DOCUMENTS_CAPABILITY and config.mesh.stage == 1
    is_fused = config.model.attention == 'cudnn' and config.mesh.context == 1
    return is_fused and config.data.document_mask and not kernel_masks_documents


def attended_positions(config: Config, capability: tuple[int, int] | None = None) -> float:
    """Returns the scores computed per query of a head: mean over layers and queries.

    A kernel that knows document boundaries computes fewer, depending on the number of documents.
    """
    window, windows = config.data.seq_len, layer_windows(config.model)
    reaches = [min(sliding or window, window) for sliding in windows]
    if config.mesh.context > 1:
        # Pairs of visible chunks, each computed completely: `maxlm.model.attention.ring`.
        chunks = 2 * config.mesh.context
        size = window / chunks
        pairs = [
            sum(1 for query in range(chunks) for key in range(query + 1) if (query - key - 1) * size + 1 < reach)
            for reach in reaches
        ]
        return sum(pairs) / len(pairs) * size**2 / window
    if needs_mask(config, capability):
        # Masked scores are computed too.
        return window
    if config.model.attention == 'cudnn':
        return sum(reach * (reach + 1) / 2 + (window - reach) * reach for reach in reaches) / window / len(reaches)
    if config.model.attention == 'splash':
        blocks = sum(num_visible_blocks(window, sliding) for sliding in windows)
        return blocks * block_size(window) ** 2 / window / len(windows)
    scores = [
        (part.last - part.first) * (part.last - part.start)
        for sliding in windows
        for part in query_ranges(window, sliding)
    ]
    return sum(scores) / window / len(windows)


def attention_forwards(config: Config) -> int:
    """Returns the number of forward computations of attention. Policies can save its results by name."""
    # Ring attention has no named results.
    again = ('dots_no_batch', *RECOMPUTED) if config.mesh.context > 1 else RECOMPUTED
    return 1 + (config.model.remat_policy in again) + (config.mesh.stage > 1)


def attention_products(config: Config) -> int:
    """Returns the products of queries × positions × head dim per head: 7 without rematerialization.

    No kernel saves scores, so the backward pass recomputes them for its 4 products. Splash has two backward kernels,
    which both recompute scores and the gradients of weights.
    """
    return 2 * attention_forwards(config) + (7 if config.model.attention == 'splash' else 5)


def forward_passes(config: Config) -> float:
    """Returns the number of forward computations of a block's elementwise operations."""
    return 1 + (config.model.remat_policy != 'none') + (config.mesh.stage > 1)


def _block_flops(config: Config, tokens: float, *, is_gpu: bool) -> float:
    """Returns FLOPs of blocks: per parameter and token 2 forward, 4 backward, plus recomputation."""
    model, mesh = config.model, config.mesh
    total = flops = 0.0
    for kind, layers in layers_on_device(config):
        kernels, rows = block_kernels(kind), rows_of(config, kind)
        # XLA expands a ragged product to products of all rows for every expert: on TPUs only the gradient of the
        # kernels, on GPUs all of them.
        is_expanded = kind.expert_matmul == 'ragged_dot' and not kind.expert_capacity_factor
        expanded = rows.stored * kind.num_experts / mesh.expert
        # A kernel of experts multiplies the rows of all experts of a device.
        multiplied = rows_per_token(config, expanded if is_expanded and is_gpu else rows.multiplied)
        per_token = {
            name: kernel.inputs * kernel.outputs * (multiplied if kernel.is_of_experts else 1)
            for name, kernel in kernels.items()
        }
        block = sum(per_token.values())
        of_experts = sum(size for name, size in per_token.items() if kernels[name].is_of_experts)
        # The weighted sum of the experts' outputs, and the mean probability of each expert.
        flops = 6.0 * block + 6 * kind.num_experts_per_token * kind.dim + 4 * kind.num_experts
        if of_experts and is_expanded and not is_gpu:
            flops += 2 * of_experts * (expanded / rows.multiplied - 1)
        # In a pipeline the stages are a batch dimension of every product, so dots_no_batch saves none of them.
        if model.remat_policy in RECOMPUTED or (model.remat_policy == 'dots_no_batch' and mesh.stage > 1):
            # The last product of a residual branch is not recomputed: at most its sum with the stream is needed.
            down = per_token.get('shared.down' if kind.num_experts else 'down', 0)
            last = down + (per_token['out'] if model.parallel_residual else 0)
            flops += 2 * (block - last)
        elif model.remat_policy == 'dots_no_batch' or (
            model.remat_policy == 'dots' and not kind.expert_capacity_factor
        ):
            # Policies do not save the products of groups of rows.
            flops += 2 * of_experts
        if mesh.stage > 1:
            # A pipeline recomputes a complete chunk of layers from its input.
            flops += 2 * block
        total += flops * layers
    # Modules of multi-token prediction have the last kind of block. Their projections are not split over mesh.tensor.
    projections = tokens * model.mtp_depth * 12 * model.dim**2
    return tokens * (total + flops * model.mtp_depth) / mesh.tensor + projections


def _teacher_flops(config: Config, tokens: float) -> float:
    per_token = teacher_flops(config, config.data.seq_len).causal
    return tokens * per_token / (config.mesh.stage * config.mesh.tensor)


def _head_flops(config: Config, tokens: float) -> float:
    """Returns FLOPs of the logits and both of their gradients (`cross_entropy`), shared by the pipeline stages."""
    losses = 1 + config.model.mtp_depth
    return 6 * tokens * losses * config.model.dim * _vocabulary(config) / config.mesh.stage


def _vocabulary(config: Config) -> float:
    """Returns the vocabulary size on a device, including padding."""
    return padded_vocabulary(config.model.vocab_size, config.mesh.tensor) / config.mesh.tensor


def _attention_flops(config: Config, tokens: float, capability: tuple[int, int] | None) -> float:
    model, mesh = config.model, config.mesh
    # About half of the products have the width of the keys, the others that of the values.
    per_position = attention_products(config) * model.num_heads * (model.head_dim + model.value_dim)
    per_layer = per_position * attended_positions(config, capability)
    return tokens * per_layer * (model.num_layers + model.mtp_depth) / (mesh.stage * mesh.tensor)


def _muon_flops(config: Config) -> float:
    """Returns FLOPs of Newton–Schulz, for matrices spread over devices by layer.

    Each iteration computes x xᵀ, its square, and their sum times x.
    """
    if config.optimizer.name != 'muon':
        return 0.0
    mesh = config.mesh
    parts = mesh.data * mesh.fsdp * mesh.expert * mesh.context * mesh.tensor
    flops = 0.0
    for kind in layer_stacks(config.model):
        for name, kernel in block_kernels(kind).items():
            if name == 'router':
                continue
            narrow, wide = sorted((kernel.inputs, kernel.outputs))
            # The experts of a layer are spread over devices, or the layers if there are no experts.
            if kernel.is_of_experts:
                matrices = math.ceil(kernel.num / parts) * kind.num_layers / mesh.stage
            else:
                matrices = math.ceil(kind.num_layers / (mesh.stage * parts))
            flops += ITERATIONS * (4 * narrow**2 * wide + 2 * narrow**3) * matrices
    return flops


def _activation_bytes(config: Config, tokens: float, capability: tuple[int, int] | None) -> float:
    """Returns the bytes of activations read and written between products, with one kernel per elementwise chain.

    Forward, in elements per token and block: a norm reads the stream for its sums and again for its result, which it
    writes (3 D). A residual addition reads two arrays and writes one (3 D). The rotation reads and writes queries and
    keys. The activation reads one or two arrays of F and writes one. Attention reads q, k, v and writes its output. The
    gradient of each reads its inputs and the gradient, and writes: twice the forward amount.
    """
    model, mesh = config.model, config.mesh
    width = jnp.dtype(model.dtype).itemsize
    heads, kv_heads = model.num_heads * model.head_dim / mesh.tensor, model.num_kv_heads * model.head_dim / mesh.tensor
    stream = (3 * (2 if model.norm_placement == 'both' else 1) + 3) * 2 * model.dim
    attention = 2 * heads + 2 * kv_heads
    rotation = 2 * (heads + kv_heads) if model.position_embedding == 'rotary' else 0
    head_norms = 3 * (heads + kv_heads) if model.qk_norm else 0
    others = stream + attention + rotation + head_norms
    blocks = 0.0
    for kind, layers in layers_on_device(config):
        activation = (3 if model.activation in GATED_ACTIVATIONS else 2) * activation_dim(config, kind)
        forward = width * (others + activation) + rows_per_token(config, dispatch_bytes(config, kind))
        block = forward * (2 + forward_passes(config)) + score_bytes(config, capability) + quantization_bytes(config)
        blocks += block * layers
    # Logits: written in float32; read for their maximum, for the sum and for the gradient; the gradient is written once
    #     and read by two products.
    logits = _vocabulary(config) * (16 + 3 * width) / mesh.stage
    # The embedding: a row is read and written; its gradient is added to the table's in float32.
    lookup = model.dim * (2 * width + 12)
    return tokens * (blocks + logits + lookup)


def quantization_bytes(config: Config) -> float:
    """Returns the bytes per token and block of the quantization to FP8.

    Inputs of products and gradients of their outputs are read for their maximum, read again and written in 8 bits.
    """
    model, tensor = config.model, config.mesh.tensor
    if model.matmul_precision != 'fp8':
        return 0.0
    heads, kv_heads = (number * model.head_dim / tensor for number in (model.num_heads, model.num_kv_heads))
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    inputs = 2 * model.dim + heads + model.ffn_dim / tensor
    outputs = 2 * model.dim + heads + 2 * kv_heads + gates * model.ffn_dim / tensor
    return (2 * jnp.dtype(model.dtype).itemsize + 1) * (inputs * forward_passes(config) + outputs)


def score_bytes(config: Config, capability: tuple[int, int] | None) -> float:
    """Returns the bytes per token and block of scores that are stored in memory."""
    model, mesh = config.model, config.mesh
    width = jnp.dtype(model.dtype).itemsize
    scores = model.num_heads / mesh.tensor * attended_positions(config, capability)
    if model.attention == 'splash':
        return 0.0
    if mesh.context == 1 and model.attention == 'cudnn':
        # The mask, which is added to the scores of each head, forward and backward.
        return 2 * width * scores if needs_mask(config, capability) else 0.0
    # Forward: scores are written in float32 and read for maximum and sum; the weights are written and read. Backward:
    #     scores and the gradients of weights are written in float32 and read. They give the weights, which one product
    #     reads, and the gradients of scores, which two products read.
    forward, backward = 12 + 2 * width, 16 + 5 * width
    return scores * (forward * attention_forwards(config) + backward)


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
    sums = (chunks - 1) * 8 * model.dim * _vocabulary(config) / mesh.stage
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
