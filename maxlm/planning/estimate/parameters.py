"""Lists all parameters of a model from its config, without arrays or tracing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from maxlm.config.families import GATED_ACTIVATIONS
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
    return {
        name.split('.')[-1]: Kernel(math.prod(inputs), math.prod(outputs))
        for name, inputs, outputs, _, _ in _projections(model)
    }


def latent_elements(model: ModelConfig) -> int:
    """Returns the elements per token of the latents of latent attention, before and after their norms."""
    return 2 * (model.q_lora_rank + model.kv_lora_rank) + model.qk_rope_head_dim


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
        yield weight._replace(
            name=f'blocks.{weight.name}', shape=(model.num_layers, *weight.shape), axes=('layers', *weight.axes)
        )


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
    if model.attention_sinks:
        yield Weight('attention.sinks', (model.num_heads,), ('heads',), 'vector')
    if model.q_lora_rank:
        yield from _norm(model, 'attention.query_latent_norm', model.q_lora_rank)
    if model.kv_lora_rank:
        yield from _norm(model, 'attention.key_value_latent_norm', model.kv_lora_rank)


def _projections(model: ModelConfig) -> Iterator[_Projection]:
    D, ffn, wide = (model.dim,), (model.ffn_dim,), ('embed',)
    heads = (model.num_heads, model.head_dim)
    if model.kv_lora_rank:
        latent = (model.kv_lora_rank,)
        if model.q_lora_rank:
            yield _Projection('attention.query_latent', D, (model.q_lora_rank,), wide, ('latent',))
        queries_from = (model.q_lora_rank or model.dim,)
        yield _Projection('attention.query', queries_from, heads, wide, ('heads', 'head_dim'))
        joint = (model.kv_lora_rank + model.qk_rope_head_dim,)
        yield _Projection('attention.key_value_latent', D, joint, wide, ('latent',))
        for name, width in (('key', model.qk_nope_head_dim), ('value', model.v_head_dim)):
            yield _Projection(f'attention.{name}', latent, (model.num_heads, width), wide, ('heads', 'head_dim'))
    else:
        kv_heads = (model.num_kv_heads, model.head_dim)
        for name, outputs, axis in (
            ('query', heads, 'heads'),
            ('key', kv_heads, 'kv_heads'),
            ('value', kv_heads, 'kv_heads'),
        ):
            yield _Projection(f'attention.{name}', D, outputs, wide, (axis, 'head_dim'))
    yield _Projection('attention.out', (model.num_heads, model.value_dim), D, ('heads', 'head_dim'), wide)
    for name in ('gate', 'up') if model.activation in GATED_ACTIVATIONS else ('up',):
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
