"""What one device does in one step: products of matrices, bytes of memory, bytes sent. Formulas of the config alone.

Nothing is traced or compiled, so that a search may ask for thousands of layouts.

Letters: D width, F feed-forward, N query heads, K key/value heads, H head dim, V vocabulary, T window.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from maxlm.config.keys import Config
from maxlm.model.attention import QUERY_BLOCK
from maxlm.model.blocks import layer_windows
from maxlm.model.pipeline import bubble_fraction
from maxlm.planning.collectives import estimate_transfers
from maxlm.planning.matrices import block_kernels, block_parameters, model_parameters
from maxlm.planning.transfers import Transfer
from maxlm.training.muon import ITERATIONS

# Bytes of a moment of one parameter, as it is stored.
MOMENT_BYTES = {'float32': 4.0, 'bfloat16': 2.0, 'int8': 1.0}
# Policies of model.remat under which a block is computed again from its input.
RECOMPUTED = ('full', 'offload')


class Work(NamedTuple):
    """Of one device in one optimizer step. Of a pipeline without its idle iterations, which `idle` tells."""

    # In products of matrices outside of attention, what is computed again included.
    flops: float
    # In the two products of attention, and in their gradients.
    attention_flops: float
    # Read from and written to device memory by all that is no product.
    memory_bytes: float
    # To host memory and back.
    host_bytes: float
    # Share of the step in which a stage of a pipeline waits for the others.
    idle: float
    transfers: list[Transfer]

    @property
    def all_flops(self) -> float:
        return self.flops + self.attention_flops


def estimate_work(config: Config) -> Work:
    """The work of a resolved config's step on each of its devices."""
    mesh, train = config.mesh, config.train
    tokens = train.global_batch * config.data.window / (config.batch_shards * mesh.context)
    return Work(
        flops=_product_flops(config, tokens) + _muon_flops(config),
        attention_flops=_attention_flops(config, tokens),
        memory_bytes=_activation_bytes(config, tokens) + _weight_bytes(config) + _update_bytes(config),
        host_bytes=_host_bytes(config, tokens),
        idle=bubble_fraction(mesh.stage, mesh.stage_repeats, config.accumulation) if mesh.stage > 1 else 0.0,
        transfers=estimate_transfers(config),
    )


def attended_positions(config: Config) -> float:
    """Scores that are computed for each query of a head: mean over layers and queries."""
    window, windows = config.data.window, layer_windows(config.model)
    reaches = [min(sliding or window, window) for sliding in windows]
    if config.mesh.context > 1:
        # Pairs of chunks that are in sight, each of them whole: `maxlm.model.ring`.
        chunks = 2 * config.mesh.context
        size = window / chunks
        pairs = [
            sum(1 for query in range(chunks) for key in range(query + 1) if (query - key - 1) * size + 1 < reach)
            for reach in reaches
        ]
        return sum(pairs) / len(pairs) * size**2 / window
    if config.model.attention == 'cudnn' and not config.data.isolate_documents:
        return sum(reach * (reach + 1) / 2 + (window - reach) * reach for reach in reaches) / window / len(reaches)
    # A mask is an array like any other: what it hides is computed all the same.
    return window


def attention_products(config: Config) -> int:
    """Products of queries × positions × head dim that are computed for each head: 6 with nothing computed again."""
    model, window = config.model, config.data.window
    fused = config.mesh.context > 1 or model.attention == 'cudnn'
    # Kernels that keep no scores make them again for the gradient; so do our blocks of queries.
    in_blocks = window > QUERY_BLOCK and window % QUERY_BLOCK == 0
    products = 7 if fused or in_blocks else 6
    if config.mesh.context > 1:
        again = model.remat in ('dots_no_batch', *RECOMPUTED)
    elif model.attention == 'cudnn':
        again = model.remat in RECOMPUTED
    else:
        if model.remat == 'dots':
            # Scores are the output of a product.
            products = 6
        again = model.remat in ('dots_no_batch', *RECOMPUTED)
    return products + 2 * again + 2 * (config.mesh.stage > 1)


def forward_passes(config: Config) -> float:
    """How often a block's elements are computed in the direction forward."""
    return 1 + (config.model.remat != 'none') + (config.mesh.stage > 1)


def _product_flops(config: Config, tokens: float) -> float:
    """2 per parameter and token forward, 4 backward, and what is computed again."""
    model, mesh = config.model, config.mesh
    kernels = block_kernels(model)
    block = block_parameters(model)
    per_token = 6.0 * block
    # In a pipeline every product has the stages as a batch, so that dots_no_batch keeps none of them.
    if model.remat in RECOMPUTED or (model.remat == 'dots_no_batch' and mesh.stage > 1):
        # The last product of a residual branch is not needed again: only the sum with the stream is, if anything.
        last = kernels['down'].size + (kernels['out'].size if model.parallel_residual else 0)
        per_token += 2 * (block - last)
    if mesh.stage > 1:
        # A pipeline computes a whole chunk of layers again, from its input.
        per_token += 2 * block
    # Logits are never kept (`cross_entropy_sum`). The stages of a pipeline share them.
    head = 8 * model.dim * model.vocab_size
    return tokens * (per_token * model.num_layers + head) / (mesh.stage * mesh.tensor)


def _attention_flops(config: Config, tokens: float) -> float:
    model, mesh = config.model, config.mesh
    per_layer = 2 * attention_products(config) * model.num_heads * model.head_dim * attended_positions(config)
    return tokens * per_layer * model.num_layers / (mesh.stage * mesh.tensor)


def _muon_flops(config: Config) -> float:
    """Newton–Schulz: x xᵀ, its square, and their sum times x, of whole matrices spread over devices by layer."""
    if config.optimizer.name != 'muon':
        return 0.0
    mesh = config.mesh
    parts = mesh.stage * mesh.data * mesh.fsdp * mesh.context * mesh.tensor
    flops = 0
    for kernel in block_kernels(config.model).values():
        narrow, wide = sorted(kernel)
        flops += ITERATIONS * (4 * narrow**2 * wide + 2 * narrow**3)
    return flops * math.ceil(config.model.num_layers / parts)


def _activation_bytes(config: Config, tokens: float) -> float:
    """What is read and written between products, where each chain of elementwise operations is one kernel.

    Forward, in elements of a token and block: a norm reads the stream for its sums and again for its result, which it
    writes (3 D); adding to the stream reads two and writes one (3 D); the rotation reads and writes queries and keys;
    the activation reads one or two of F and writes one; attention reads q, k, v and writes its output. The gradient of
    each reads its inputs and the gradient, and writes: twice as much.
    """
    model, mesh = config.model, config.mesh
    width = jnp.dtype(model.dtype).itemsize
    heads, kv_heads = model.num_heads * model.head_dim / mesh.tensor, model.num_kv_heads * model.head_dim / mesh.tensor
    stream = (3 + 3) * 2 * model.dim
    attention = 2 * heads + 2 * kv_heads
    rotation = 2 * (heads + kv_heads) if model.position == 'rotary' else 0
    head_norms = 3 * (heads + kv_heads) if model.qk_norm else 0
    activation = (3 if model.activation == 'swiglu' else 2) * model.ffn_dim / mesh.tensor
    forward = width * (stream + attention + rotation + head_norms + activation)
    block = forward * (2 + forward_passes(config)) + _score_bytes(config)
    # Logits: written in float32, read for their largest and for the sum, and once more for the gradient, which is
    # written and read by two products.
    logits = model.vocab_size / mesh.tensor * (2 * (4 + 8) + 3 * width) / mesh.stage
    # The table: a row read and written; its gradient added to the table's in float32.
    lookup = model.dim * (2 * width + 12)
    return tokens * (block * model.num_layers / mesh.stage + logits + lookup)


def _score_bytes(config: Config) -> float:
    """Of a token and block: scores that pass through memory."""
    model, mesh = config.model, config.mesh
    width = jnp.dtype(model.dtype).itemsize
    scores = model.num_heads / mesh.tensor * attended_positions(config)
    if mesh.context == 1 and model.attention == 'cudnn':
        # The mask, which is added to the scores of each head, forward and backward.
        return 2 * width * scores if config.data.isolate_documents else 0.0
    # Written in float32 and read for the largest and for the sum; the weights are written and read. Backward they are
    # read twice, and their gradients pass the same way.
    forward, backward = 12 + 2 * width, 12 + 5 * width
    forwards = (attention_products(config) - 4) / 2
    return scores * (forward * forwards + backward)


def _weight_bytes(config: Config) -> float:
    """Parameters cast and brought together for each micro-batch, and their gradients added up."""
    model, mesh = config.model, config.mesh
    width = jnp.dtype(model.dtype).itemsize
    saved_over = mesh.fsdp * mesh.context
    whole = model_parameters(model) / (mesh.stage * mesh.tensor)
    held = whole / saved_over if mesh.zero == 3 else whole
    summed = whole / saved_over if mesh.zero >= 2 else whole
    # Forward and backward: read in float32, written in the type of the computation, and as a whole after a gather.
    passes = 2 * (held * (4 + width) + whole * width * (saved_over > 1 and mesh.zero == 3))
    # A gradient is written whole, read to be summed over devices, written into its stack and added to the totals.
    gradients = whole * 2 * width + summed * (4 + 12)
    return config.accumulation * (passes + gradients)


def _update_bytes(config: Config) -> float:
    """The optimizer's: each array read and written once in one pass over all of them, and the passes before it."""
    model, mesh, optimizer = config.model, config.mesh, config.optimizer
    parts = mesh.stage * mesh.tensor * mesh.fsdp * mesh.context
    matrices = model.num_layers * block_parameters(model)
    moment = 2 * MOMENT_BYTES[optimizer.moments]
    # The gradient: divided (read, written), squared for its norm, used. The parameter: used, written, and its norm.
    per_parameter = 16 + 12 + (8 if optimizer.ema_decay else 0)
    moments = model_parameters(model) * 2 * moment
    orthogonal = 0.0
    if optimizer.name == 'muon':
        moments -= matrices * moment
        # Three products in each iteration, whose results are scaled and added.
        spread = parts * mesh.data
        orthogonal = ITERATIONS * 6 * jnp.dtype(model.dtype).itemsize * matrices / spread
    return (model_parameters(model) * per_parameter + moments) / parts + orthogonal


def _host_bytes(config: Config, tokens: float) -> float:
    model, mesh, optimizer = config.model, config.mesh, config.optimizer
    held = model_parameters(model) / (mesh.stage * mesh.tensor * mesh.fsdp * mesh.context)
    total = 0.0
    if mesh.offload != 'none':
        # Moments come and go; a moving average is a parameter.
        total += held * 2 * 2 * MOMENT_BYTES[optimizer.moments]
    if mesh.offload == 'all':
        # Parameters come forward, backward and for the update, after which they go back.
        total += held * 4 * (2 * config.accumulation + 2 + (2 if optimizer.ema_decay else 0))
    if model.remat == 'offload':
        total += tokens * model.dim * jnp.dtype(model.dtype).itemsize * 2 * model.num_layers / mesh.stage
    return total
