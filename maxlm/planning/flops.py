"""Floating-point operations and parameters of a model, counted from its shapes.

A multiply-add is 2 operations. Only matrix products count, as is usual (Kaplan et al. 2020; Chowdhery et al. 2022,
PaLM, appendix B): the embedding lookup, norms and softmax do not, nor does what rematerialisation computes again.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.keys import ModelConfig
from maxlm.model.blocks import layer_windows
from maxlm.planning.matrices import block_parameters


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
