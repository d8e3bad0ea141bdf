"""Maps the tensors of each architecture to maxlm's parameters.

All layouts are reshapes, transposes or concatenations, so both directions are exact. Rotary pairs are half a head apart
in maxlm and in most architectures, so the order within heads does not change. Only nanochat rotates in the opposite
direction, so its halves are swapped, and DeepSeek-V3 rotates adjacent pairs; see
`maxlm.huggingface.tensors.latent_attention`.

Shapes: D dim, F feed-forward, N query heads, K key/value heads, H head dim, V vocabulary, P positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.huggingface.tensors.experts import MIXTRAL_NAMES, ExpertNames, experts, gpt_oss_experts
from maxlm.huggingface.tensors.latent_attention import latent_attention
from maxlm.huggingface.tensors.layer_tensor import LayerTensor, Shape
from maxlm.huggingface.tensors.mtp import MTP_ARCHITECTURES, mtp_module

# Prefix of all tensor names except the head's. It is missing if the file contains the model without its head.
PREFIXES = {
    'gpt2': 'transformer.',
    'gpt_neox': 'gpt_neox.',
    'llama': 'model.',
    'mistral': 'model.',
    'qwen3': 'model.',
    'nanochat': 'model.',
    **dict.fromkeys(('qwen2', 'smollm3', 'olmo2', 'olmo3', 'granite', 'phi3', 'gemma2', 'gemma3_text'), 'model.'),
    **dict.fromkeys(('mixtral', 'qwen3_moe', 'deepseek_v2', 'deepseek_v3', 'gpt_oss', 'starcoder2'), 'model.'),
}
HEADS = {'gpt_neox': 'embed_out.weight'}
# Masks and frequencies that old versions of Transformers saved with the parameters, as patterns of full names.
_ROTARY_BUFFERS = (r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq', r'model\.rotary_emb\.inv_freq')
BUFFERS = {
    'gpt2': (r'transformer\.h\.\d+\.attn\.(masked_)?bias',),
    'gpt_neox': (
        r'gpt_neox\.layers\.\d+\.attention\.(masked_)?bias',
        r'gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq',
        r'gpt_neox\.rotary_emb\.inv_freq',
    ),
}
BUFFERS |= {architecture: _ROTARY_BUFFERS for architecture, prefix in PREFIXES.items() if prefix == 'model.'}


class Tensor(NamedTuple):
    """A tensor of a file and its source parameters.

    Attributes:
        name: name in the files of Transformers.
        shape: stored shape.
        sources: dotted paths of maxlm's parameters.
        source_shapes: their shapes, for one layer unless `layer` is None.
        layer: index into the leading axis of the sources; None if they have no such axis.
        expert: index into the next axis of the sources, if the tensor contains one expert of several.
        to_hf: arrays of `source_shapes` → one array of `shape`, often a view.
        from_hf: inverse of `to_hf`; for a tensor of one expert, it returns only this expert.
    """

    name: str
    shape: Shape
    sources: tuple[str, ...]
    source_shapes: tuple[Shape, ...]
    layer: int | None
    to_hf: Callable[[Sequence[np.ndarray]], np.ndarray]
    from_hf: Callable[[np.ndarray], Sequence[np.ndarray]]
    expert: int | None = None

    def in_stack(self, stack: str, index: int) -> Tensor:
        """Returns the tensor of a layer with sources at an index of another stack than `blocks`."""
        return self._replace(sources=tuple(source.replace('blocks', stack, 1) for source in self.sources), layer=index)


def tensors(architecture: str, model: ModelConfig) -> list[Tensor]:
    """Returns all tensors of a resolved model in the order of its layers.

    Args:
        architecture: a model_type of `maxlm.huggingface.architectures.table.ARCHITECTURES`.
        model: a model that the architecture can express.
    """
    block, outer_specs = {
        'gpt2': (_gpt2_block, _gpt2_outside),
        'gpt_neox': (_neox_block, _neox_outside),
        'phi3': (_phi3_block, _llama_outside),
        'nanochat': (_nanochat_block, _llama_outside),
        'mixtral': (_mixtral_block, _llama_outside),
        'deepseek_v2': (_deepseek_block, _llama_outside),
        'deepseek_v3': (_deepseek_block, _llama_outside),
        'gpt_oss': (_gpt_oss_block, _llama_outside),
    }.get(architecture, (_llama_block, _llama_outside))
    specs_before, specs_after = outer_specs(model)
    first = model.num_dense_layers if model.num_experts else 0
    dense = dataclasses.replace(model, num_experts=0)
    layers = [row.tensor(layer).in_stack('dense_blocks', layer) for layer in range(first) for row in block(dense)]
    for layer in range(first, model.num_layers):
        layers += [row.tensor(layer)._replace(layer=layer - first) for row in block(model)]
    for index in range(model.mtp_depth if architecture in MTP_ARCHITECTURES else 0):
        rows = (*block(model), *_layer_specs(mtp_module(model)))
        layers += [row.tensor(model.num_layers + index).in_stack('mtp.block', index) for row in rows]
    prefix = PREFIXES[architecture]
    all_tensors = [*(row.tensor(None) for row in specs_before), *layers, *(row.tensor(None) for row in specs_after)]
    all_tensors = [tensor._replace(name=prefix + tensor.name) for tensor in all_tensors]
    if model.reward_head or not model.tie_embeddings:
        head = HEADS.get(architecture, 'lm_head.weight')
        name, source = ('score.weight', 'score.kernel') if model.reward_head else (head, 'head.kernel')
        all_tensors.append(_TensorSpec(name, (source,), _transposed((model.dim,), (model.num_outputs,))).tensor(None))
    return all_tensors


def parameter_shapes(rows: Sequence[Tensor]) -> dict[str, Shape]:
    """Returns dotted path → shape of the source parameters of tensors, stacked over layers."""
    # The last tensor of a parameter is of the last layer.
    return {
        path: shape if tensor.layer is None else (tensor.layer + 1, *shape)
        for tensor in rows
        for path, shape in zip(tensor.sources, tensor.source_shapes, strict=True)
    }


class _Layout(NamedTuple):
    shape: Shape
    source_shapes: tuple[Shape, ...]
    to_hf: Callable[[Sequence[np.ndarray]], np.ndarray]
    from_hf: Callable[[np.ndarray], Sequence[np.ndarray]]


class _TensorSpec(NamedTuple):
    """A tensor of any layer. `#` in its name stands for the layer's index."""

    name: str
    sources: tuple[str, ...]
    layout: _Layout
    expert: int | None = None

    def tensor(self, layer: int | None) -> Tensor:
        name = self.name if layer is None else self.name.replace('#', str(layer))
        shape, source_shapes, to_hf, from_hf = self.layout
        return Tensor(name, shape, self.sources, source_shapes, layer, to_hf, from_hf, self.expert)


def _identity(*shape: int) -> _Layout:
    return _Layout(shape, (shape,), lambda arrays: arrays[0], lambda array: [array])


def _reshaped(source_shape: Shape, shape: Shape) -> _Layout:
    """Changes only the shape of an array."""
    return _Layout(
        shape, (source_shape,), lambda arrays: arrays[0].reshape(shape), lambda array: [array.reshape(source_shape)]
    )


def _flattened(*shape: int) -> _Layout:
    """Flattens a bias to one axis."""
    return _reshaped(shape, (math.prod(shape),))


def _transposed(in_shape: Shape, out_shape: Shape) -> _Layout:
    """Converts a kernel [in, out] to the weight [out, in] of torch.nn.Linear, with one axis per side."""
    rows, columns = math.prod(in_shape), math.prod(out_shape)
    return _Layout(
        (columns, rows),
        (in_shape + out_shape,),
        lambda arrays: arrays[0].reshape(rows, columns).T,
        lambda array: [array.T.reshape(in_shape + out_shape)],
    )


def _half_swapped(in_shape: Shape, out_shape: Shape) -> _Layout:
    """Layout `_transposed` with the halves of each head swapped.

    The pair (a, b) rotated by -x equals the pair (b, a) rotated by x, swapped. Applied to both queries and keys, it
    gives the products of the opposite rotation.
    """
    shape, source_shapes, to_hf, from_hf = _transposed(in_shape, out_shape)
    half = out_shape[-1] // 2
    return _Layout(
        shape,
        source_shapes,
        lambda arrays: to_hf([np.roll(arrays[0], half, axis=-1)]),
        lambda array: [np.roll(from_hf(array)[0], half, axis=-1)],
    )


def _conv1d(in_shape: Shape, out_shape: Shape) -> _Layout:
    """Converts a kernel [in, out] to the weight of GPT-2's Conv1D, which has the same order."""
    return _reshaped(in_shape + out_shape, (math.prod(in_shape), math.prod(out_shape)))


def _fused_qkv(in_shape: Shape, out_shape: Shape) -> _Layout:
    """Concatenates kernels (or biases, in_shape = ()) of queries, keys and values in the last axis."""
    columns, shape = math.prod(out_shape), in_shape + out_shape
    return _Layout(
        (*in_shape, 3 * columns),
        (shape,) * 3,
        lambda arrays: np.concatenate([array.reshape(*in_shape, columns) for array in arrays], axis=-1),
        lambda array: [chunk.reshape(shape) for chunk in np.split(array, 3, axis=-1)],
    )


def _interleaved_qkv(heads: int, head_dim: int, in_shape: Shape) -> _Layout:
    """Layout of GPT-NeoX's query_key_value: rows of queries, keys and values of head 0, then of head 1, and so on."""
    N, H = heads, head_dim
    rank = len(in_shape)

    def to_hf(arrays: Sequence[np.ndarray]) -> np.ndarray:
        heads_first = [np.moveaxis(array, range(rank), range(2, 2 + rank)) for array in arrays]
        return np.stack(heads_first, axis=1).reshape(N * 3 * H, *in_shape)

    def from_hf(array: np.ndarray) -> list[np.ndarray]:
        array = array.reshape(N, 3, H, *in_shape)
        return [np.moveaxis(array[:, i], range(2, 2 + rank), range(rank)) for i in range(3)]

    return _Layout((N * 3 * H, *in_shape), ((*in_shape, N, H),) * 3, to_hf, from_hf)


def _stacked_rows(in_shape: Shape, out_shapes: Sequence[Shape]) -> _Layout:
    """Concatenates weights [out, in] of several projections of the same input."""
    layouts = [_transposed(in_shape, out_shape) for out_shape in out_shapes]
    stops = np.cumsum([layout.shape[0] for layout in layouts])
    return _Layout(
        (int(stops[-1]), math.prod(in_shape)),
        tuple(layout.source_shapes[0] for layout in layouts),
        lambda arrays: np.concatenate(
            [layout.to_hf([array]) for layout, array in zip(layouts, arrays, strict=True)], axis=0
        ),
        lambda array: [
            layout.from_hf(rows)[0] for layout, rows in zip(layouts, np.split(array, stops[:-1]), strict=True)
        ],
    )


_POST_NORMS = {
    'post_attention_layernorm': 'attention_post_norm',
    'post_feedforward_layernorm': 'feedforward_post_norm',
}
QUERY_KEY_VALUE = tuple(f'blocks.attention.{name}' for name in ('query', 'key', 'value'))


def _norm(name: str, path: str, model: ModelConfig) -> Iterator[_TensorSpec]:
    if model.norm_use_scale:
        yield _TensorSpec(f'{name}.weight', (f'{path}.scale',), _identity(model.dim))
        if model.norm == 'layernorm' and model.has_bias('norm'):
            yield _TensorSpec(f'{name}.bias', (f'{path}.bias',), _identity(model.dim))


def _linear(
    name: str,
    path: str,
    in_shape: Shape,
    out_shape: Shape,
    *,
    use_bias: bool,
    layout: Callable[[Shape, Shape], _Layout] = _transposed,
) -> Iterator[_TensorSpec]:
    yield _TensorSpec(f'{name}.weight', (f'{path}.kernel',), layout(in_shape, out_shape))
    if use_bias:
        yield _TensorSpec(f'{name}.bias', (f'{path}.bias',), _flattened(*out_shape))


def _gpt2_outside(model: ModelConfig) -> tuple[list[_TensorSpec], list[_TensorSpec]]:
    """Returns the specs before and after the layers."""
    specs_before = [
        _TensorSpec('wte.weight', ('embedding',), _identity(model.vocab_size, model.dim)),
        _TensorSpec('wpe.weight', ('position_embedding',), _identity(model.max_positions, model.dim)),
    ]
    return specs_before, list(_norm('ln_f', 'final_norm', model))


def _gpt2_block(model: ModelConfig) -> Iterator[_TensorSpec]:
    D, F, N, H = model.dim, model.ffn_dim, model.num_heads, model.head_dim
    kernels, biases = (tuple(f'{path}.{kind}' for path in QUERY_KEY_VALUE) for kind in ('kernel', 'bias'))
    yield from _norm('h.#.ln_1', 'blocks.attention_norm', model)
    yield _TensorSpec('h.#.attn.c_attn.weight', kernels, _fused_qkv((D,), (N, H)))
    yield _TensorSpec('h.#.attn.c_attn.bias', biases, _fused_qkv((), (N, H)))
    yield from _linear('h.#.attn.c_proj', 'blocks.attention.out', (N, H), (D,), use_bias=True, layout=_conv1d)
    yield from _norm('h.#.ln_2', 'blocks.feedforward_norm', model)
    yield from _linear('h.#.mlp.c_fc', 'blocks.feedforward.up', (D,), (F,), use_bias=True, layout=_conv1d)
    yield from _linear('h.#.mlp.c_proj', 'blocks.feedforward.down', (F,), (D,), use_bias=True, layout=_conv1d)


def _neox_outside(model: ModelConfig) -> tuple[list[_TensorSpec], list[_TensorSpec]]:
    specs_before = [_TensorSpec('embed_in.weight', ('embedding',), _identity(model.vocab_size, model.dim))]
    return specs_before, list(_norm('final_layer_norm', 'final_norm', model))


def _neox_block(model: ModelConfig) -> Iterator[_TensorSpec]:
    D, F, N, H = model.dim, model.ffn_dim, model.num_heads, model.head_dim
    kernels, biases = (tuple(f'{path}.{kind}' for path in QUERY_KEY_VALUE) for kind in ('kernel', 'bias'))
    yield from _norm('layers.#.input_layernorm', 'blocks.attention_norm', model)
    yield from _norm('layers.#.post_attention_layernorm', 'blocks.feedforward_norm', model)
    yield _TensorSpec('layers.#.attention.query_key_value.weight', kernels, _interleaved_qkv(N, H, (D,)))
    if use_bias := model.has_bias('qkv'):
        yield _TensorSpec('layers.#.attention.query_key_value.bias', biases, _interleaved_qkv(N, H, ()))
    yield from _linear('layers.#.attention.dense', 'blocks.attention.out', (N, H), (D,), use_bias=use_bias)
    yield from _linear('layers.#.mlp.dense_h_to_4h', 'blocks.feedforward.up', (D,), (F,), use_bias=True)
    yield from _linear('layers.#.mlp.dense_4h_to_h', 'blocks.feedforward.down', (F,), (D,), use_bias=True)


def _llama_outside(model: ModelConfig) -> tuple[list[_TensorSpec], list[_TensorSpec]]:
    specs_before = [_TensorSpec('embed_tokens.weight', ('embedding',), _identity(model.vocab_size, model.dim))]
    return specs_before, list(_norm('norm', 'final_norm', model))


def _llama_block(model: ModelConfig) -> Iterator[_TensorSpec]:
    """Yields tensors with Llama's names, also for related architectures; the model's settings select them."""
    H = model.head_dim
    # With norms before and after the branches, Gemma's names differ from Llama's: `post_attention_layernorm` is applied
    # to the output of attention.
    norms = {
        'pre': {'input_layernorm': 'attention_norm', 'post_attention_layernorm': 'feedforward_norm'},
        'post': _POST_NORMS,
        'both': {'input_layernorm': 'attention_norm', 'pre_feedforward_layernorm': 'feedforward_norm', **_POST_NORMS},
    }[model.norm_placement]
    for name, path in norms.items():
        yield from _norm(f'layers.#.{name}', f'blocks.{path}', model)
    yield from _llama_attention(model, _transposed)
    if model.qk_norm:
        all_heads = model.qk_norm_scope == 'projection'
        for name, heads in {'query': model.num_heads, 'key': model.num_kv_heads}.items():
            layout = _identity(heads * H if all_heads else H)
            source = f'blocks.attention.{name}_norm.scale'
            yield _TensorSpec(f'layers.#.self_attn.{name[0]}_norm.weight', (source,), layout)
    yield from _llama_feedforward(model)


def _llama_feedforward(model: ModelConfig) -> Iterator[_TensorSpec]:
    if model.num_experts:
        yield from _layer_specs(experts(model, ExpertNames()))
        return
    D, F, use_bias = model.dim, model.ffn_dim, model.has_bias('mlp')
    is_gated = model.activation in GATED_ACTIVATIONS
    # Names of Llama, and of StarCoder2.
    up, down = ('up_proj', 'down_proj') if is_gated else ('c_fc', 'c_proj')
    if is_gated:
        yield from _linear('layers.#.mlp.gate_proj', 'blocks.feedforward.gate', (D,), (F,), use_bias=use_bias)
    yield from _linear(f'layers.#.mlp.{up}', 'blocks.feedforward.up', (D,), (F,), use_bias=use_bias)
    yield from _linear(f'layers.#.mlp.{down}', 'blocks.feedforward.down', (F,), (D,), use_bias=use_bias)


def _layer_specs(found: Iterator[LayerTensor]) -> Iterator[_TensorSpec]:
    for name, sources, shape, source_shapes, to_hf, from_hf, expert in found:
        yield _TensorSpec(name, sources, _Layout(shape, source_shapes, to_hf, from_hf), expert)


def _mixtral_block(model: ModelConfig) -> Iterator[_TensorSpec]:
    yield from _norm('layers.#.input_layernorm', 'blocks.attention_norm', model)
    yield from _llama_attention(model, _transposed)
    yield from _norm('layers.#.post_attention_layernorm', 'blocks.feedforward_norm', model)
    yield from _layer_specs(experts(model, MIXTRAL_NAMES))


def _gpt_oss_block(model: ModelConfig) -> Iterator[_TensorSpec]:
    yield from _norm('layers.#.input_layernorm', 'blocks.attention_norm', model)
    yield _TensorSpec('layers.#.self_attn.sinks', ('blocks.attention.sinks',), _identity(model.num_heads))
    yield from _llama_attention(model, _transposed)
    yield from _norm('layers.#.post_attention_layernorm', 'blocks.feedforward_norm', model)
    yield from _layer_specs(gpt_oss_experts(model))


def _deepseek_block(model: ModelConfig) -> Iterator[_TensorSpec]:
    yield from _norm('layers.#.input_layernorm', 'blocks.attention_norm', model)
    yield from _layer_specs(latent_attention(model))
    yield from _norm('layers.#.post_attention_layernorm', 'blocks.feedforward_norm', model)
    yield from _llama_feedforward(model)


def _llama_attention(model: ModelConfig, query_key_layout: Callable[[Shape, Shape], _Layout]) -> Iterator[_TensorSpec]:
    D, N, K, H = model.dim, model.num_heads, model.num_kv_heads, model.head_dim
    layouts = (query_key_layout, query_key_layout, _transposed)
    for letter, heads, path, layout in zip('qkv', (N, K, K), QUERY_KEY_VALUE, layouts, strict=True):
        name = f'layers.#.self_attn.{letter}_proj'
        yield from _linear(name, path, (D,), (heads, H), use_bias=model.has_bias('qkv'), layout=layout)
    out_bias = model.has_bias('out')
    yield from _linear('layers.#.self_attn.o_proj', 'blocks.attention.out', (N, H), (D,), use_bias=out_bias)


def _nanochat_block(model: ModelConfig) -> Iterator[_TensorSpec]:
    D, F = model.dim, model.ffn_dim
    yield from _llama_attention(model, _half_swapped)
    yield from _linear('layers.#.mlp.fc1', 'blocks.feedforward.up', (D,), (F,), use_bias=False)
    yield from _linear('layers.#.mlp.fc2', 'blocks.feedforward.down', (F,), (D,), use_bias=False)


def _phi3_block(model: ModelConfig) -> Iterator[_TensorSpec]:
    D, F, N, K, H = model.dim, model.ffn_dim, model.num_heads, model.num_kv_heads, model.head_dim
    kernels = tuple(f'{path}.kernel' for path in QUERY_KEY_VALUE)
    gates = ('blocks.feedforward.gate.kernel', 'blocks.feedforward.up.kernel')
    yield from _norm('layers.#.input_layernorm', 'blocks.attention_norm', model)
    yield _TensorSpec('layers.#.self_attn.qkv_proj.weight', kernels, _stacked_rows((D,), ((N, H), (K, H), (K, H))))
    yield from _linear('layers.#.self_attn.o_proj', 'blocks.attention.out', (N, H), (D,), use_bias=False)
    yield from _norm('layers.#.post_attention_layernorm', 'blocks.feedforward_norm', model)
    yield _TensorSpec('layers.#.mlp.gate_up_proj.weight', gates, _stacked_rows((D,), ((F,), (F,))))
    yield from _linear('layers.#.mlp.down_proj', 'blocks.feedforward.down', (F,), (D,), use_bias=False)
