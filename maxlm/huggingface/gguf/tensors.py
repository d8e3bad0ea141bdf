"""Maps the tensors of each architecture to the names and layouts of GGUF files.

The layouts are those of llama.cpp's conversion scripts. They differ from those of Transformers in four ways:

- One tensor contains all experts of a layer.
- Latent attention has separate tensors for keys and values. That of the keys is transposed, because llama.cpp applies
  it to queries.
- Architectures with interleaved rotation have permuted rows of queries and keys.
- The scales of norms with `model.norm_unit_offset` contain the offset.

Shapes: N query heads, C kv_lora_rank, P head dim without rotary positions, V value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.families import is_of_experts
from maxlm.huggingface.gguf.architectures import GgufArchitecture
from maxlm.huggingface.state_dict import Tensor

Shape = tuple[int, ...]


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file and its source parameters.

    Attributes:
        name: name in the file.
        hf_name: name in the files of Transformers, for messages. That of merged experts does not number them.
        shape: stored shape.
        sources: dotted paths of maxlm's parameters.
        layer: index into the leading axis of the sources; None if they have no such axis.
        convert: arrays of the sources → one array of `shape`, often a view.
        invert: one array of `shape` → arrays of the sources.
        is_float32: llama.cpp requires float32 values.
    """

    name: str
    hf_name: str
    shape: Shape
    sources: tuple[str, ...]
    layer: int | None
    convert: Callable[[Sequence[np.ndarray]], np.ndarray]
    invert: Callable[[np.ndarray], Sequence[np.ndarray]]
    is_float32: bool


def gguf_tensors(rows: Sequence[Tensor], model: ModelConfig, target: GgufArchitecture, names: Any) -> list[GgufTensor]:
    """Returns the tensors of the file in the order of `rows`.

    Args:
        rows: tensors of Transformers.
        model: resolved model.
        target: architecture of the file.
        names: gguf's map from the names of Transformers to those of the file.
    """
    found: dict[str, GgufTensor] = {}
    for row in rows:
        for part in _parts(row, model, target):
            # The name of attention sinks has no suffix.
            full = part.hf_name if part.hf_name.endswith(('.weight', '.bias')) else f'{part.hf_name}.weight'
            name = names.get_name(full, try_suffixes=('.weight', '.bias'))
            assert name is not None, part.hf_name
            is_float32 = len(part.shape) == 1 or name.endswith('.bias') or '.ffn_gate_inp.' in name
            # All experts of a layer have the same name.
            found.setdefault(name, GgufTensor(name, *part[:3], row.layer, part.convert, part.invert, is_float32))
    return list(found.values())


class _Part(NamedTuple):
    """Name, shape, sources and conversions of a tensor."""

    hf_name: str
    shape: Shape
    sources: tuple[str, ...]
    convert: Callable[[Sequence[np.ndarray]], np.ndarray]
    invert: Callable[[np.ndarray], Sequence[np.ndarray]]


def _parts(row: Tensor, model: ModelConfig, target: GgufArchitecture) -> Iterator[_Part]:
    """Yields the tensors that replace a tensor of Transformers."""
    if is_of_experts(row.sources[0]):
        # gguf knows these names for the experts of all architectures.
        module = '.'.join(row.name.split('.')[:3]) + '.mlp.experts'
        for source, shape in zip(row.sources, row.source_shapes, strict=True):
            kind, leaf = source.split('.')[-2:]
            if leaf == 'kernel':
                transposed = (shape[0], shape[2], shape[1])
                name = f'{module}.{kind}_proj.weight'
                yield _Part(name, transposed, (source,), lambda arrays: arrays[0].mT, lambda array: [array.mT])
            else:
                name = f'{module}.{kind}_proj.bias'
                yield _Part(name, shape, (source,), lambda arrays: arrays[0], lambda array: [array])
    elif row.name.endswith('.kv_b_proj.weight'):
        prefix = row.name.removesuffix('kv_b_proj.weight')
        (C, N, P), (_, _, V) = row.source_shapes
        keys, values = row.sources
        yield _Part(
            f'{prefix}k_b_proj.weight',
            (N, C, P),
            (keys,),
            lambda arrays: arrays[0].transpose(1, 0, 2),
            lambda array: [array.transpose(1, 0, 2)],
        )
        yield _Part(
            f'{prefix}v_b_proj.weight',
            (N, V, C),
            (values,),
            lambda arrays: arrays[0].transpose(1, 2, 0),
            lambda array: [array.transpose(2, 0, 1)],
        )
    else:
        name = row.name.replace('e_score_correction_bias', 'e_score_correction.bias')

        def convert(arrays: Sequence[np.ndarray]) -> np.ndarray:
            values = row.to_hf(arrays)
            if target.is_interleaved:
                values = interleave_rotary(row.name, values, model)
            return values + 1 if model.norm_unit_offset and row.name.endswith('norm.weight') else values

        def invert(array: np.ndarray) -> Sequence[np.ndarray]:
            values = array - 1 if model.norm_unit_offset and row.name.endswith('norm.weight') else array
            if target.is_interleaved:
                values = separate_rotary(row.name, values, model)
            return row.from_hf(values)

        yield _Part(name, row.shape, row.sources, convert, invert)


def interleave_rotary(name: str, values: np.ndarray, model: ModelConfig) -> np.ndarray:
    """Permutes a Transformers tensor for interleaved rotation: interleaves the halves of each query and key head."""
    return _permute_heads(name, values, model, (2, model.head_dim // 2))


def separate_rotary(name: str, values: np.ndarray, model: ModelConfig) -> np.ndarray:
    """Returns the inverse of `interleave_rotary`."""
    return _permute_heads(name, values, model, (model.head_dim // 2, 2))


def _permute_heads(name: str, values: np.ndarray, model: ModelConfig, axes: tuple[int, int]) -> np.ndarray:
    heads = {'q_proj': model.num_heads, 'k_proj': model.num_kv_heads}.get(name.split('.')[-2])
    if heads is None:
        return values
    return values.reshape(heads, *axes, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
