"""Counts the floating-point operations and parameters of a model from its shapes.

A multiply-add is 2 operations. Only matrix products count, as is usual (Kaplan et al. 2020; Chowdhery et al. 2022,
PaLM, appendix B). The embedding lookup, norms, softmax and rematerialization do not count. Of the experts of a layer,
those that process a token count.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.schema import Config, ModelConfig
from maxlm.model.layers.masks import layer_windows
from maxlm.planning.estimate.parameters import block_kernels, layer_stacks, weights
from maxlm.training.optimizers.trainable import is_trained

# Kinds of parameters that multiply tokens.
PRODUCTS = ('matrix', 'router', 'head', 'adapter')


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
    D, V = model.dim, model.vocab_size
    stacks = layer_stacks(model)
    active = [sum(kernel.active_size for kernel in block_kernels(stack).values()) for stack in stacks]
    blocks = sum(stack.num_layers * size for stack, size in zip(stacks, active, strict=True))
    # A module of multi-token prediction has a projection and a block, and uses the output projection again.
    return blocks + D * V + model.mtp_depth * (active[-1] + 2 * D**2 + D * V)


def training_flops(model: ModelConfig, window: int) -> TokenFlops:
    """Returns FLOPs per token: 6 per matmul parameter, and 6 · N · (H + value width) per layer and position."""
    dense = 6 * matmul_parameters(model)
    per_position = 6 * model.num_heads * (model.head_dim + model.value_dim)
    windows = layer_windows(model)
    reaches = [min(sliding or window, window) for sliding in (*windows, *[windows[-1]] * model.mtp_depth)]
    # The first tokens of a sequence attend to fewer positions.
    causal = sum(reach * (reach + 1) / 2 + (window - reach) * reach for reach in reaches) / window
    return TokenFlops(causal=dense + per_position * causal, full=dense + per_position * sum(reaches))


def step_flops(config: Config, window: int) -> TokenFlops:
    """Returns FLOPs per token of a run, which depend on frozen parameters and on a reference model.

    The forward pass and the gradient of the inputs take 2 operations each per matmul parameter. The gradient of a
    trained parameter takes 2 more. A reference model or a teacher adds a forward pass.
    """
    model = config.model
    base = training_flops(model, window)
    products = [w for w in weights(model) if w.kind in PRODUCTS or w.name == tied_head(model)]
    frozen = sum(weight.active_size(model) for weight in products if not is_trained(config, weight.name))
    adapters = sum(weight.active_size(model) for weight in products if weight.kind == 'adapter')
    # An adapter takes three passes.
    dense = 6 * adapters - 2 * frozen
    forward = 1 / 3 if config.has_reference else 0.0
    return TokenFlops(
        *(
            flops * (1 + forward) + dense + taught
            for flops, taught in zip(base, teacher_flops(config, window), strict=True)
        )
    )


def teacher_flops(config: Config, window: int) -> TokenFlops:
    """Returns FLOPs per token of the forward pass of a resolved config's teacher; 0 without one."""
    if config.teacher is None:
        return TokenFlops(0.0, 0.0)
    return TokenFlops(*(flops / 3 for flops in training_flops(config.teacher, window)))


def tied_head(model: ModelConfig) -> str:
    """Returns the name of the table that is also the head; '' if the head is separate."""
    return 'embedding' if model.tie_embeddings else ''
