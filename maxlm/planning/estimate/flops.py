"""Counts the floating-point operations and parameters of a model from its shapes.

A multiply-add is 2 operations. Only matrix products count, as is usual (Kaplan et al. 2020; Chowdhery et al. 2022,
PaLM, appendix B). The embedding lookup, norms, softmax and rematerialization do not count. Of the experts of a layer,
those that process a token count.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.schema import Config, ModelConfig
from maxlm.model.layers.masks import layer_windows
from maxlm.planning.estimate.parameters import block_kernels, layer_kinds, weights
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
    blocks = (
        kind.num_layers * sum(kernel.active_size for kernel in block_kernels(kind).values())
        for kind in layer_kinds(model)
    )
    return sum(blocks) + model.dim * model.vocab_size


def training_flops(model: ModelConfig, window: int) -> TokenFlops:
    """Returns FLOPs per token: 6 per matmul parameter, and 6 · N · (H + value width) per layer and position."""
    dense = 6 * matmul_parameters(model)
    per_position = 6 * model.num_heads * (model.head_dim + model.value_dim)
    reaches = [min(sliding or window, window) for sliding in layer_windows(model)]
    # The first tokens of a sequence attend to fewer positions.
    causal = sum(reach * (reach + 1) / 2 + (window - reach) * reach for reach in reaches) / window
    return TokenFlops(causal=dense + per_position * causal, full=dense + per_position * sum(reaches))


def step_flops(config: Config, window: int) -> TokenFlops:
    """Returns FLOPs per token of a run, which depend on frozen parameters and on a reference model.

    The forward pass and the gradient of the inputs take 2 operations each per matmul parameter. The gradient of a
    trained parameter takes 2 more. A reference model adds a forward pass.
    """
    model = config.model
    base = training_flops(model, window)
    products = [w for w in weights(model) if w.kind in PRODUCTS or w.name == tied_head(model)]
    frozen = sum(weight.active_size(model) for weight in products if not is_trained(config, weight.name))
    adapters = sum(weight.active_size(model) for weight in products if weight.kind == 'adapter')
    # An adapter takes three passes.
    dense = 6 * adapters - 2 * frozen
    forward = 1 / 3 if config.has_reference else 0.0
    return TokenFlops(*(flops * (1 + forward) + dense for flops in base))


def tied_head(model: ModelConfig) -> str:
    """Returns the name of the table that is also the head; '' if the head is separate."""
    return 'embedding' if model.tie_embeddings else ''
