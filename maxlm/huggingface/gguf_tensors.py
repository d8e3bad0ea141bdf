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
from maxlm.huggingface.architectures.gguf import GgufArchitecture
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
        is_float32: llama.cpp requires float32 values.
    """

    name: str
    hf_name: str
    shape: Shape
    sources: tuple[str, ...]
    layer: int | None
    convert: Callable[[Sequence[np.ndarray]], np.ndarray]
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
        for hf_name, shape, sources, convert in _parts(row, model, target):
            # The name of attention sinks has no suffix.
            full = hf_name if hf_name.endswith(('.weight', '.bias')) else f'{hf_name}.weight'
            name = names.get_name(full, try_suffixes=('.weight', '.bias'))
            assert name is not None, hf_name
            is_float32 = len(shape) == 1 or name.endswith('.bias') or '.ffn_gate_inp.' in name
            # All experts of a layer have the same name.
            found.setdefault(name, GgufTensor(name, hf_name, shape, sources, row.layer, convert, is_float32))
    return list(found.values())


_Part = tuple[str, Shape, tuple[str, ...], Callable[[Sequence[np.ndarray]], np.ndarray]]


def _parts(row: Tensor, model: ModelConfig, target: GgufArchitecture) -> Iterator[_Part]:
    """Yields name, shape, sources and conversion of the tensors that replace a tensor of Transformers."""
    if is_of_experts(row.sources[0]):
        # gguf knows these names for the experts of all architectures.
        module = '.'.join(row.name.split('.')[:3]) + '.mlp.experts'
        for source, shape in zip(row.sources, row.source_shapes, strict=True):
            kind, leaf = source.split('.')[-2:]
            if leaf == 'kernel':
                transposed = (shape[0], shape[2], shape[1])
                yield f'{module}.{kind}_proj.weight', transposed, (source,), lambda arrays: arrays[0].mT
            else:
                yield f'{module}.{kind}_proj.bias', shape, (source,), lambda arrays: arrays[0]
    elif row.name.endswith('.kv_b_proj.weight'):
        prefix = row.name.removesuffix('kv_b_proj.weight')
        (C, N, P), (_, _, V) = row.source_shapes
        keys, values = row.sources
        yield f'{prefix}k_b_proj.weight', (N, C, P), (keys,), lambda arrays: arrays[0].transpose(1, 0, 2)
        yield f'{prefix}v_b_proj.weight', (N, V, C), (values,), lambda arrays: arrays[0].transpose(1, 2, 0)
    else:
        name = row.name.replace('e_score_correction_bias', 'e_score_correction.bias')

        def convert(arrays: Sequence[np.ndarray]) -> np.ndarray:
            values = row.to_hf(arrays)
            if target.is_interleaved:
                values = interleave_rotary(row.name, values, model)
            return values + 1 if model.norm_unit_offset and row.name.endswith('norm.weight') else values

        yield name, row.shape, row.sources, convert


def interleave_rotary(name: str, values: np.ndarray, model: ModelConfig) -> np.ndarray:
    """Permutes a Transformers tensor for interleaved rotation: interleaves the halves of each query and key head."""
    heads = {'q_proj': model.num_heads, 'k_proj': model.num_kv_heads}.get(name.split('.')[-2])
    if heads is None:
        return values
    rest = values.shape[1:]
    return values.reshape(heads, 2, model.head_dim // 2, *rest).swapaxes(1, 2).reshape(values.shape)
