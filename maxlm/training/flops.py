"""Counts the floating-point operations and parameters of a model from its shapes, and the scores of attention.

A multiply-add is 2 operations. Only matrix products count, as is usual (Kaplan et al. 2020; Chowdhery et al. 2022,
PaLM, appendix B). The embedding lookup, norms, softmax and rematerialization do not count. Of the experts of a layer,
those that process a token count.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.schema import Config, ModelConfig
from maxlm.model.attention.chunked import query_ranges
from maxlm.model.attention.cudnn import documents_per_row, lists_documents
from maxlm.model.attention.splash import block_size, num_visible_blocks
from maxlm.model.layers.masks import layer_windows
from maxlm.model.parameters import block_kernels, layer_stacks, weights
from maxlm.model.value_embedding import VALUE_GATES
from maxlm.training.optimizers.trainable import is_trained

# Kinds of parameters that multiply tokens.
PRODUCTS = ('matrix', 'router', 'head', 'adapter')
# Values of model.remat_policy that recompute a block from its input.
RECOMPUTED = ('full', 'offload')
# Values of model.attention that are kernels of cuDNN.
CUDNN_KERNELS = ('cudnn', 'cudnn_mask')
# Fused kernels for GPUs, which compute only the scores of a causal row or window.
GPU_KERNELS = (*CUDNN_KERNELS, 'tokamax')


class TokenFlops(NamedTuple):
    """Training operations (forward and backward) for one token.

    Attributes:
        causal: a token attends to itself and earlier tokens, as a causal kernel computes.
        full: a token attends to the complete sequence, or to the complete sliding window of a layer. This is the older
            convention, for comparison with published figures.
    """

    causal: float
    full: float


def matmul_parameters(model: ModelConfig) -> int:
    """Returns the parameters of a resolved model that multiply a token, including the output projection."""
    D, V = model.dim, model.num_outputs
    stacks = layer_stacks(model)
    active = [sum(kernel.active_size for kernel in block_kernels(stack).values()) for stack in stacks]
    blocks = sum(stack.num_layers * size for stack, size in zip(stacks, active, strict=True))
    blocks += sum(weight.size for weight in weights(model) if weight.name == VALUE_GATES)
    # A module of multi-token prediction has a projection and a block, and uses the output projection again.
    return blocks + D * (V + model.value_head) + model.mtp_depth * (active[-1] + 2 * D**2 + D * V)


def training_flops(model: ModelConfig, seq_len: int) -> TokenFlops:
    """Returns FLOPs per token: 6 per matmul parameter, and 6 · N · (H + value width) per layer and position."""
    dense = 6 * matmul_parameters(model)
    per_position = 6 * model.num_heads * (model.head_dim + model.value_dim)
    reaches = [min(sliding or seq_len, seq_len) for sliding in block_windows(model)]
    # The first tokens of a sequence attend to fewer positions.
    causal = sum(reach * (reach + 1) / 2 + (seq_len - reach) * reach for reach in reaches) / seq_len
    return TokenFlops(causal=dense + per_position * causal, full=dense + per_position * sum(reaches))


def block_windows(model: ModelConfig) -> tuple[int, ...]:
    """Returns the sliding window of each layer, then of each module of multi-token prediction; 0 = full attention."""
    windows = layer_windows(model)
    return (*windows, *windows[-1:] * model.mtp_depth)


def step_flops(config: Config, seq_len: int) -> TokenFlops:
    """Returns FLOPs per token of a run, which depend on frozen parameters and on a reference model.

    The forward pass and the gradient of the inputs take 2 operations each per matmul parameter. The gradient of a
    trained parameter takes 2 more. A reference model or a teacher adds a forward pass. The reference point of KTO adds
    one of the model and one of its reference.
    """
    model = config.model
    base = training_flops(model, seq_len)
    products = [w for w in weights(model) if w.kind in PRODUCTS or w.name == tied_head(model)]
    frozen = sum(weight.active_size(model) for weight in products if not is_trained(config, weight.name))
    adapters = sum(weight.active_size(model) for weight in products if weight.kind == 'adapter')
    # An adapter takes three passes.
    dense = 6 * adapters - 2 * frozen
    has_forward = config.grpo.has_kl_loss if config.train.objective == 'grpo' else config.has_reference
    forward = 1 / 3 if has_forward else 0.0
    forward += 2 / 3 if config.has_reference_point else 0.0
    return TokenFlops(
        *(
            flops * (1 + forward) + dense + taught
            for flops, taught in zip(base, teacher_flops(config, seq_len), strict=True)
        )
    )


def teacher_flops(config: Config, seq_len: int) -> TokenFlops:
    """Returns FLOPs per token of the forward pass of a resolved config's teacher; 0 without one."""
    if config.teacher is None:
        return TokenFlops(0.0, 0.0)
    return TokenFlops(*(flops / 3 for flops in training_flops(config.teacher, seq_len)))


def tied_head(model: ModelConfig) -> str:
    """Returns the name of the table that is also the head; '' if the head is separate."""
    return 'embedding' if model.tie_embeddings and not model.reward_head else ''


def needs_mask(config: Config, capability: tuple[int, int] | None) -> bool:
    """Returns True if a fused kernel takes documents as a mask array; see `maxlm.model.attention.cudnn`."""
    is_fused = config.model.attention in CUDNN_KERNELS and config.mesh.context == 1
    return is_fused and config.data.document_mask and not lists_documents(config, capability)


def attention_workspace(config: Config, capability: tuple[int, int] | None) -> int:
    """Returns the bytes per device of the gradients of scores, which cuDNN stores on Hopper in deterministic runs.

    Source: NVIDIA/cudnn-frontend #398. With a list of documents, the rows of the scores are those of the list.
    """
    model, seq_len = config.model, config.data.seq_len
    is_cudnn = model.attention in CUDNN_KERNELS and config.mesh.context == 1
    if not (config.train.deterministic and is_cudnn and capability is not None and capability[0] == 9):
        return 0
    listed = documents_per_row(seq_len) if lists_documents(config, capability) else 1
    rows = config.train.per_device_batch_size * listed
    return 2 * rows * (model.num_heads // config.mesh.tensor) * seq_len**2


def attended_positions(config: Config, capability: tuple[int, int] | None = None) -> float:
    """Returns the scores computed per query of a head: mean over layers and queries.

    A kernel that knows document boundaries computes fewer, depending on the number of documents.
    """
    seq_len, windows = config.data.seq_len, block_windows(config.model)
    reaches = [min(sliding or seq_len, seq_len) for sliding in windows]
    if config.mesh.context > 1:
        # Pairs of visible chunks, each computed completely: `maxlm.model.attention.ring`.
        chunks = 2 * config.mesh.context
        size = seq_len / chunks
        pairs = [
            sum(1 for query in range(chunks) for key in range(query + 1) if (query - key - 1) * size + 1 < reach)
            for reach in reaches
        ]
        return sum(pairs) / len(pairs) * size**2 / seq_len
    if needs_mask(config, capability):
        # Masked scores are computed too.
        return seq_len
    if config.model.attention in GPU_KERNELS:
        return sum(reach * (reach + 1) / 2 + (seq_len - reach) * reach for reach in reaches) / seq_len / len(reaches)
    if config.model.attention == 'splash':
        blocks = sum(num_visible_blocks(seq_len, sliding) for sliding in windows)
        return blocks * block_size(seq_len) ** 2 / seq_len / len(windows)
    scores = [
        (part.last - part.first) * (part.last - part.start)
        for sliding in windows
        for part in query_ranges(seq_len, sliding)
    ]
    return sum(scores) / seq_len / len(windows)


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
