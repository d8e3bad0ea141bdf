"""Tensors of DeepSeek-V3's modules of multi-token prediction, which are numbered as layers after the last one.

A module has the tensors of a layer, those of this file, and copies of the model's embedding and head. The projection
reads the normalized embedding, then the normalized hidden states, as in `maxlm.model.mtp`.

Shapes: D dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from maxlm.config.schema import ModelConfig
from maxlm.huggingface.tensors.layer_tensor import LayerTensor

# Architectures whose files can have modules.
MTP_ARCHITECTURES = ('deepseek_v3',)
_NORMS = {'enorm': 'embedding_norm', 'hnorm': 'hidden_norm', 'shared_head.norm': 'final_norm'}


def count_modules(names: Iterable[str], num_layers: int) -> int:
    """Returns the number of modules in the tensor names of a file: layers that do not belong to the model."""
    found = (re.match(r'(?:model\.)?layers\.(\d{1,9})\.', name) for name in names)
    return len({int(match[1]) for match in found if match} - set(range(num_layers)))


def mtp_module(model: ModelConfig) -> Iterator[LayerTensor]:
    """Yields the tensors of a module that a layer does not have."""
    D = model.dim
    for name, path in _NORMS.items():
        source = f'mtp.{path}.scale'
        yield LayerTensor(
            f'layers.#.{name}.weight', (source,), (D,), ((D,),), lambda arrays: arrays[0], lambda array: [array]
        )
    yield LayerTensor(
        'layers.#.eh_proj.weight',
        ('mtp.projection.kernel',),
        (D, 2 * D),
        ((2 * D, D),),
        lambda arrays: arrays[0].T,
        lambda array: [array.T],
    )


def shared_copies(model: ModelConfig) -> dict[str, str]:
    """Returns copy → original of the names of the tensors that the modules share with the model."""
    embedding = 'model.embed_tokens.weight'
    head = embedding if model.tie_embeddings else 'lm_head.weight'
    return {
        f'model.layers.{layer}.{name}.weight': original
        for layer in range(model.num_layers, model.num_layers + model.mtp_depth)
        for name, original in {'embed_tokens': embedding, 'shared_head.head': head}.items()
    }
