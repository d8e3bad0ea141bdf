"""The matrices and tables of a model, from its config alone."""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.keys import ModelConfig


class Kernel(NamedTuple):
    """A matrix of a block."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


class Tables(NamedTuple):
    """Elements that stand outside of the blocks."""

    tokens: int
    # Learned positions.
    positions: int
    # A head of its own; 0 where the table of tokens serves.
    head: int


def block_kernels(model: ModelConfig) -> dict[str, Kernel]:
    """The matrices of one block of a resolved model."""
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    kernels = {
        'query': Kernel(model.dim, heads),
        'key': Kernel(model.dim, kv_heads),
        'value': Kernel(model.dim, kv_heads),
        'out': Kernel(heads, model.dim),
        'up': Kernel(model.dim, model.ffn_dim),
        'down': Kernel(model.ffn_dim, model.dim),
    }
    return {**kernels, 'gate': Kernel(model.dim, model.ffn_dim)} if model.activation == 'swiglu' else kernels


def block_parameters(model: ModelConfig) -> int:
    """Elements of the matrices of one block."""
    return sum(kernel.size for kernel in block_kernels(model).values())


def tables(model: ModelConfig) -> Tables:
    """The tables of a resolved model."""
    tokens = model.vocab_size * model.dim
    positions = model.max_positions * model.dim if model.position == 'learned' else 0
    return Tables(tokens, positions, 0 if model.tie_embeddings else tokens)


def model_parameters(model: ModelConfig) -> int:
    """Elements of all matrices and tables of a resolved model; scales and biases, few as they are, are left out."""
    return model.num_layers * block_parameters(model) + sum(tables(model))
