"""Floating-point operations and parameters of a model, counted from its shapes.

A multiply-add is 2 operations. Only matrix products count, as is usual (Kaplan et al. 2020; Chowdhery et al. 2022,
PaLM, appendix B): the embedding lookup, norms and softmax do not, nor does what rematerialisation computes again.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.schema import Config, ModelConfig
from maxlm.model.layers.masks import layer_windows
from maxlm.planning.estimate.parameters import block_parameters, weights
from maxlm.training.optimizers.trainable import is_trained


class TokenFlops(NamedTuple):
    """Training operations (forward and backward) for one token."""

    # A token attends to what lies behind it: the work that a causal kernel has to do.
    causal: float
    # A token attends to the whole window, or to all of a layer's sliding window: the older convention, for comparison
    # with published figures.
    full: float


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters of a resolved model that every token is multiplied with, the output projection included."""
    return model.num_layers * block_parameters(model) + model.dim * model.vocab_size


def training_flops(model: ModelConfig, window: int) -> TokenFlops:
    """Per token at this window: 6 per matmul parameter, and 12 · N · H per layer and position that is attended to."""
    dense = 6 * matmul_parameters(model)
    per_position = 12 * model.num_heads * model.head_dim
    reaches = [min(sliding or window, window) for sliding in layer_windows(model)]
    # The first tokens of a window see fewer than a layer reaches.
    causal = sum(reach * (reach + 1) / 2 + (window - reach) * reach for reach in reaches) / window
    return TokenFlops(causal=dense + per_position * causal, full=dense + per_position * sum(reaches))


def step_flops(config: Config, window: int) -> TokenFlops:
    """Per token of what a run trains: less where parameters are frozen, more where there is a reference.

    Forward and backward to the inputs are 2 operations each per matmul parameter, and 2 for the gradient of each that
    is trained; the reference has a forward pass of its own.
    """
    model = config.model
    whole = training_flops(model, window)
    products = [w for w in weights(model) if w.kind in ('matrix', 'head', 'adapter') or w.name == tied_head(model)]
    frozen = sum(weight.size for weight in products if not is_trained(config, weight.name))
    adapters = sum(weight.size for weight in products if weight.kind == 'adapter')
    # An adapter's three passes.
    dense = 6 * adapters - 2 * frozen
    forward = 1 / 3 if config.has_reference else 0.0
    return TokenFlops(*(flops * (1 + forward) + dense for flops in whole))


def tied_head(model: ModelConfig) -> str:
    """Name of the table that serves as the head too; '' = there is none."""
    return 'embedding' if model.tie_embeddings else ''
