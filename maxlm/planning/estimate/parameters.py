"""Lists all parameters of a model from its config, without arrays or tracing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.lora import adapter_of


class Kernel(NamedTuple):
    """Shape of a matrix of a block."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


class Tables(NamedTuple):
    """Numbers of elements outside of the blocks.

    Attributes:
        tokens: elements of the token embedding.
        positions: elements of learned positions.
        head: elements of a separate head; 0 if the token embedding is the head.
    """

    tokens: int
    positions: int
    head: int


def block_kernels(model: ModelConfig) -> dict[str, Kernel]:
    """Returns the matrices of one block of a resolved model."""
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
    """Returns the number of elements of the matrices of one block."""
    return sum(kernel.size for kernel in block_kernels(model).values())


def tables(model: ModelConfig) -> Tables:
    """Returns the table sizes of a resolved model."""
    tokens = model.vocab_size * model.dim
    positions = model.max_positions * model.dim if model.position_embedding == 'learned' else 0
    return Tables(tokens, positions, 0 if model.tie_embeddings else tokens)


class Weight(NamedTuple):
    """A parameter of the decoder. Parameters of blocks are stacked over layers.

    Attributes:
        name: dotted path in the tree of parameters.
        shape: shape of the array.
        axes: logical axes, as in `maxlm.parallel.layout.TABLE`.
        kind: as `maxlm.training.optimizers.optimizer.kind_of`: table, head, matrix or adapter (of a block) or vector.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _Projection(NamedTuple):
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    in_axes: tuple[str, ...]
    out_axes: tuple[str, ...]


def weights(model: ModelConfig) -> Iterator[Weight]:
    """Yields all parameters of a resolved model, matching `maxlm.model.decoder`."""
    D, V = model.dim, model.vocab_size
    yield Weight('embedding', (V, D), ('vocab', 'embed'), 'table')
    if model.position_embedding == 'learned':
        yield Weight('position_embedding', (model.max_positions, D), ('position', 'embed'), 'table')
    if not model.tie_embeddings:
        yield Weight('head.kernel', (D, V), ('embed', 'vocab'), 'head')
    for norm in ('final_norm', *(('embedding_norm',) if model.embedding_norm else ())):
        yield from _norm(model, norm, D)
    for weight in _of_block(model):
        yield _stacked(weight, 'blocks', model.num_layers)
    if model.mtp_depth:
        for weight in _of_mtp_module(model):
            yield _stacked(weight, 'mtp', model.mtp_depth)


def _stacked(weight: Weight, stack: str, layers: int) -> Weight:
    return weight._replace(name=f'{stack}.{weight.name}', shape=(layers, *weight.shape), axes=('layers', *weight.axes))


def _of_mtp_module(model: ModelConfig) -> Iterator[Weight]:
    D = model.dim
    for norm in ('hidden_norm', 'embedding_norm', 'final_norm'):
        yield from _norm(model, norm, D)
    yield Weight('projection.kernel', (2 * D, D), ('embed', 'activation'), 'matrix')
    for weight in _of_block(model):
        yield weight._replace(name=f'block.{weight.name}')


def _of_block(model: ModelConfig) -> Iterator[Weight]:
    for name, inputs, outputs, in_axes, out_axes in _projections(model):
        yield Weight(f'{name}.kernel', inputs + outputs, in_axes + out_axes, 'matrix')
        if adapter := adapter_of(model, name):
            yield Weight(f'{name}.lora_a', (*inputs, adapter.rank), (*in_axes, 'adapter'), 'adapter')
            yield Weight(f'{name}.lora_b', (adapter.rank, *outputs), ('adapter', *out_axes), 'adapter')
        if model.use_bias:
            yield Weight(f'{name}.bias', outputs, tuple('norm' if a == 'embed' else a for a in out_axes), 'vector')
    for norm in ('attention_norm', 'feedforward_norm'):
        yield from _norm(model, norm, model.dim)
    if model.qk_norm:
        for norm in ('attention.query_norm', 'attention.key_norm'):
            yield from _norm(model, norm, model.head_dim)


def _projections(model: ModelConfig) -> Iterator[_Projection]:
    D, H = (model.dim,), model.head_dim
    heads, kv_heads, ffn = (model.num_heads, H), (model.num_kv_heads, H), (model.ffn_dim,)
    wide = ('embed',)
    for name, outputs, axis in (
        ('query', heads, 'heads'),
        ('key', kv_heads, 'kv_heads'),
        ('value', kv_heads, 'kv_heads'),
    ):
        yield _Projection(f'attention.{name}', D, outputs, wide, (axis, 'head_dim'))
    yield _Projection('attention.out', heads, D, ('heads', 'head_dim'), wide)
    for name in ('gate', 'up') if model.activation == 'swiglu' else ('up',):
        yield _Projection(f'feedforward.{name}', D, ffn, wide, ('ffn',))
    yield _Projection('feedforward.down', ffn, D, ('ffn',), wide)


def _norm(model: ModelConfig, name: str, dim: int) -> Iterator[Weight]:
    if model.norm_use_scale:
        yield Weight(f'{name}.scale', (dim,), ('norm',), 'vector')
        if model.norm == 'layernorm' and model.use_bias:
            yield Weight(f'{name}.bias', (dim,), ('norm',), 'vector')


def model_parameters(model: ModelConfig) -> int:
    """Returns the elements of the matrices and tables of a resolved model, without scales, biases and adapters."""
    return sum(weight.size for weight in weights(model) if weight.kind in ('table', 'head', 'matrix'))


def count_parameters(model: ModelConfig) -> int:
    """Returns the elements of all parameters of a resolved model, embeddings included."""
    return sum(weight.size for weight in weights(model))
