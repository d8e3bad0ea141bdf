"""Every parameter of a model, from its config alone: no arrays, no tracing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from maxlm.config.keys import ModelConfig


class Weight(NamedTuple):
    """A parameter of the decoder, those of the blocks stacked over layers."""

    shape: tuple[int, ...]
    # Logical axes, as `maxlm.training.sharding.TABLE` has them.
    axes: tuple[str, ...]
    # As `maxlm.training.optimizer.kind_of`: table, head, matrix (of a block) or vector.
    kind: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def weights(model: ModelConfig) -> Iterator[Weight]:
    """Every parameter of a resolved model, as `maxlm.model.decoder` makes them."""
    D, F, V, H = model.dim, model.ffn_dim, model.vocab_size, model.head_dim
    N, K = model.num_heads, model.num_kv_heads
    yield Weight((V, D), ('vocab', 'embed'), 'table')
    if model.position == 'learned':
        yield Weight((model.max_positions, D), ('position', 'embed'), 'table')
    if not model.tie_embeddings:
        yield Weight((D, V), ('embed', 'vocab'), 'head')
    vectors = _norm_sizes(model, D, 1) * (2 if model.embedding_norm else 1)
    yield from (Weight((size,), ('norm',), 'vector') for size in vectors)

    def stacked(shape: tuple[int, ...], axes: tuple[str, ...], kind: str) -> Weight:
        return Weight((model.num_layers, *shape), ('layers', *axes), kind)

    into: list[tuple[tuple[int, ...], tuple[str, ...]]]
    into = [((N, H), ('heads', 'head_dim')), *[((K, H), ('kv_heads', 'head_dim'))] * 2]
    into += [((F,), ('ffn',))] * (2 if model.activation == 'swiglu' else 1)
    for shape, axes in into:
        yield stacked((D, *shape), ('embed', *axes), 'matrix')
        if model.use_bias:
            yield stacked(shape, axes, 'vector')
    out_of: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((N, H), ('heads', 'head_dim')), ((F,), ('ffn',))]
    for shape, axes in out_of:
        yield stacked((*shape, D), (*axes, 'embed'), 'matrix')
        if model.use_bias:
            yield stacked((D,), ('norm',), 'vector')
    for size in _norm_sizes(model, D, 2) + (_norm_sizes(model, H, 2) if model.qk_norm else []):
        yield stacked((size,), ('norm',), 'vector')


def count_parameters(model: ModelConfig) -> int:
    """All parameters of a resolved model, embeddings included: what its abstract arrays add up to."""
    return sum(weight.size for weight in weights(model))


def _norm_sizes(model: ModelConfig, dim: int, norms: int) -> list[int]:
    if not model.norm_scale:
        return []
    has_bias = model.norm == 'layernorm' and model.use_bias
    return [dim] * norms * (2 if has_bias else 1)
