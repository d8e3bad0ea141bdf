"""Floating-point operations and parameters of a model, counted from its shapes.

A multiply-add is 2 operations. Only matrix products count, as is usual (Kaplan et al. 2020; Chowdhery et al. 2022,
PaLM, appendix B): the embedding lookup, norms and softmax do not, nor does what rematerialisation computes again.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.keys import ModelConfig


class TokenFlops(NamedTuple):
    """Training operations (forward and backward) for one token."""

    # A token attends to half of its window on average: the work that a causal kernel has to do.
    causal: float
    # A token attends to the whole window: the older convention, for comparison with published figures.
    full: float


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters of a resolved model that every token is multiplied with, the output projection included."""
    attention = model.dim * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    feedforward = model.dim * model.ffn_dim * (3 if model.activation == 'swiglu' else 2)
    return model.num_layers * (attention + feedforward) + model.dim * model.vocab_size


def training_flops(model: ModelConfig, window: int) -> TokenFlops:
    """Per token at this window: 6 per matmul parameter, and 12 · L · N · H per position that a token attends to."""
    dense = 6 * matmul_parameters(model)
    per_position = 12 * model.num_layers * model.num_heads * model.head_dim
    return TokenFlops(causal=dense + per_position * (window + 1) / 2, full=dense + per_position * window)
