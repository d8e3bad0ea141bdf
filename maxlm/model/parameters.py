"""Lists all parameters of a model from its config, without arrays or tracing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from maxlm.config.families import GATED_ACTIVATIONS
from maxlm.config.schema import ModelConfig
from maxlm.model.layers.lora import adapter_of
from maxlm.model.layers.weight_only_quantization import CODES, KERNEL, weights_of
from maxlm.parallel.layout import SAVING

# Kinds of parameters that are matrices or tables.
MATRICES = ('table', 'head', 'matrix', 'router')

# Parts of `ModelConfig.has_bias` of the projections of attention; the others are of the feed-forward.
_BIASES = {'attention.query': 'qkv', 'attention.key': 'qkv', 'attention.value': 'qkv', 'attention.out': 'out'}


class Kernel(NamedTuple):
    """Matrices of a block with the same shape.

    Attributes:
        inputs, outputs: shape of a matrix.
        num: number of matrices: 1, or the number of experts.
        num_per_token: number of the matrices that multiply a token.
    """

    inputs: int
    outputs: int
    num: int = 1
    num_per_token: int = 1

    @property
    def size(self) -> int:
        return self.num * self.inputs * self.outputs

    @property
    def active_size(self) -> int:
        return self.num_per_token * self.inputs * self.outputs

    @property
    def is_of_experts(self) -> bool:
        return self.num > 1


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


def layer_stacks(model: ModelConfig) -> list[ModelConfig]:
    """Returns a model for each kind of layer, dense layers first, with the number of layers of this kind."""
    num_dense = model.num_dense_layers
    if not num_dense:
        return [model]
    rest = dataclasses.replace(model, num_layers=model.num_layers - num_dense, num_dense_layers=0)
    dense = dataclasses.replace(
        rest, num_layers=num_dense, num_experts=0, num_experts_per_token=0, num_shared_experts=0
    )
    return [dense, rest]


def block_kernels(model: ModelConfig) -> dict[str, Kernel]:
    """Returns the matrices of one block of a resolved model without first dense layers; see `layer_stacks`."""
    kernels = {} if not model.num_experts else {'router': Kernel(model.dim, model.num_experts)}
    for name, inputs, outputs, _, _, stack, _ in _projections(model):
        of_experts = (model.num_experts, model.num_experts_per_token) if stack else ()
        short = name.removeprefix('attention.').removeprefix('feedforward.')
        kernels[short] = Kernel(math.prod(inputs), math.prod(outputs), *of_experts)
    return kernels


def latent_elements(model: ModelConfig) -> int:
    """Returns the elements per token of the latents of latent attention, before and after their norms."""
    return 2 * (model.q_lora_rank + model.kv_lora_rank) + model.qk_rope_head_dim


def block_parameters(model: ModelConfig) -> int:
    """Returns the number of elements of the matrices of one block; see `block_kernels`."""
    return sum(kernel.size for kernel in block_kernels(model).values())


def tables(model: ModelConfig) -> Tables:
    """Returns the table sizes of a resolved model."""
    tokens = model.vocab_size * model.dim
    positions = model.max_positions * model.dim if model.position_embedding == 'learned' else 0
    return Tables(tokens, positions, 0 if model.tie_embeddings else tokens)


class Weight(NamedTuple):
    """A parameter of the decoder. Parameters of blocks are stacked over layers.

    Codes and scales of a quantized kernel are one parameter, with the name of the codes and the shape of the kernel.

    Attributes:
        name: dotted path in the tree of parameters.
        shape: shape of the array.
        axes: logical axes, as in `maxlm.parallel.layout.TABLE`.
        kind: as `maxlm.training.optimizers.optimizer.kind_of`: table, head, matrix, router or adapter (of a block) or
            vector.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_of_experts(self) -> bool:
        return 'experts' in self.axes

    def active_size(self, model: ModelConfig) -> int:
        """Returns the number of elements that a token uses."""
        if not self.is_of_experts:
            return self.size
        return self.size // model.num_experts * model.num_experts_per_token


class _Projection(NamedTuple):
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    in_axes: tuple[str, ...]
    out_axes: tuple[str, ...]
    # The number of experts, and its axis.
    stack: tuple[int, ...] = ()
    stack_axes: tuple[str, ...] = ()


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
    stacks = layer_stacks(model)
    for stack in stacks:
        is_first = model.num_dense_layers > 0 and not stack.num_experts
        name, axis = ('dense_blocks', 'dense_layers') if is_first else ('blocks', 'layers')
        for weight in _of_block(stack):
            yield _stacked(weight, name, stack.num_layers, axis)
    if model.mtp_depth:
        for weight in _of_mtp_module(stacks[-1]):
            yield _stacked(weight, 'mtp', model.mtp_depth, 'layers')


def _stacked(weight: Weight, stack: str, layers: int, axis: str) -> Weight:
    return weight._replace(name=f'{stack}.{weight.name}', shape=(layers, *weight.shape), axes=(axis, *weight.axes))


def _of_mtp_module(model: ModelConfig) -> Iterator[Weight]:
    D = model.dim
    for norm in ('hidden_norm', 'embedding_norm', 'final_norm'):
        yield from _norm(model, norm, D)
    yield Weight('projection.kernel', (2 * D, D), ('embed', 'activation'), 'matrix')
    for weight in _of_block(model):
        yield weight._replace(name=f'block.{weight.name}')


def _of_block(model: ModelConfig) -> Iterator[Weight]:
    kernel = KERNEL if weights_of(model) is None else CODES
    for name, inputs, outputs, in_axes, out_axes, stack, stack_axes in _projections(model):
        yield Weight(f'{name}.{kernel}', stack + inputs + outputs, stack_axes + in_axes + out_axes, 'matrix')
        if adapter := adapter_of(model, name):
            rank, rank_axis = (adapter.rank,), ('adapter',)
            yield Weight(f'{name}.lora_a', stack + inputs + rank, stack_axes + in_axes + rank_axis, 'adapter')
            yield Weight(f'{name}.lora_b', stack + rank + outputs, stack_axes + rank_axis + out_axes, 'adapter')
        if model.has_bias(_BIASES.get(name, 'mlp')):
            bias_axes = tuple('norm' if axis in SAVING else axis for axis in out_axes)
            yield Weight(f'{name}.bias', stack + outputs, stack_axes + bias_axes, 'vector')
    if model.num_experts:
        router = 'feedforward.router'
        yield Weight(f'{router}.kernel', (model.dim, model.num_experts), ('embed', 'routes'), 'router')
        for name, exists in (('bias', model.router_use_bias), ('balance_bias', model.router_balance_bias)):
            if exists:
                yield Weight(f'{router}.{name}', (model.num_experts,), ('routes',), 'vector')
    kinds = {'pre': ('norm',), 'post': ('post_norm',), 'both': ('norm', 'post_norm')}[model.norm_placement]
    for branch in ('attention', 'feedforward'):
        for kind in kinds:
            yield from _norm(model, f'{branch}_{kind}', model.dim)
    if model.qk_norm:
        for norm, heads in (('query', model.num_heads), ('key', model.num_kv_heads)):
            num_dims = model.head_dim * (heads if model.qk_norm_scope == 'projection' else 1)
            yield from _norm(model, f'attention.{norm}_norm', num_dims)
    if model.attention_sinks:
        yield Weight('attention.sinks', (model.num_heads,), ('heads',), 'vector')
    if model.q_lora_rank:
        yield from _norm(model, 'attention.query_latent_norm', model.q_lora_rank)
    if model.kv_lora_rank:
        yield from _norm(model, 'attention.key_value_latent_norm', model.kv_lora_rank)


def _projections(model: ModelConfig) -> Iterator[_Projection]:
    D, wide = (model.dim,), ('embed',)
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
    if not model.num_experts:
        yield from _feedforward(model, 'feedforward', model.ffn_dim)
        return
    yield from _feedforward(model, 'feedforward.experts', model.expert_ffn_dim, model.num_experts)
    if model.num_shared_experts:
        yield from _feedforward(model, 'feedforward.shared', model.num_shared_experts * model.expert_ffn_dim)


def _feedforward(model: ModelConfig, module: str, width: int, num_experts: int = 0) -> Iterator[_Projection]:
    D, F = (model.dim,), (width,)
    wide, narrow = (('expert_embed',), ('expert_ffn',)) if num_experts else (('embed',), ('ffn',))
    stack, stack_axes = ((num_experts,), ('experts',)) if num_experts else ((), ())
    for name in ('gate', 'up') if model.activation in GATED_ACTIVATIONS else ('up',):
        yield _Projection(f'{module}.{name}', D, F, wide, narrow, stack, stack_axes)
    yield _Projection(f'{module}.down', F, D, narrow, wide, stack, stack_axes)


def _norm(model: ModelConfig, name: str, dim: int) -> Iterator[Weight]:
    if model.norm_use_scale:
        yield Weight(f'{name}.scale', (dim,), ('norm',), 'vector')
        if model.norm == 'layernorm' and model.has_bias('norm'):
            yield Weight(f'{name}.bias', (dim,), ('norm',), 'vector')


def model_parameters(model: ModelConfig) -> int:
    """Returns the elements of the matrices and tables of a resolved model, without scales, biases and adapters."""
    return sum(weight.size for weight in weights(model) if weight.kind in MATRICES)


def expert_parameters(model: ModelConfig) -> int:
    """Returns the elements of the matrices of all experts, without shared experts."""
    return sum(weight.size for weight in weights(model) if weight.kind == 'matrix' and weight.is_of_experts)


def count_parameters(model: ModelConfig) -> int:
    """Returns the elements of all parameters of a resolved model, embeddings included."""
    return sum(weight.size for weight in weights(model))


def count_active_parameters(model: ModelConfig) -> int:
    """Returns the elements of all parameters that a token uses: all but those of experts that it does not select."""
    return sum(weight.active_size(model) for weight in weights(model))


def parameters_text(model: ModelConfig) -> str:
    """Returns the number of parameters for log lines, with the active ones of a model with experts."""
    text = f'{count_parameters(model):,} parameters'
    return f'{text} ({count_active_parameters(model):,} active per token)' if model.num_experts else text
