"""Maps the tensors of mixture-of-experts layers to the parameters of router and experts.

The files of most architectures have separate tensors for each expert. gpt-oss has one tensor for all experts, in which
the columns of gates and up-projections alternate.

Shapes: E experts, D dim, F feed-forward of an expert, G feed-forward of all shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.huggingface.tensors.layer_tensor import LayerTensor, Shape

_PATH = 'blocks.feedforward'


class ExpertNames(NamedTuple):
    """Names of the modules of a layer in Transformers."""

    module: str = 'layers.#.mlp'
    gate: str = 'gate_proj'
    up: str = 'up_proj'
    down: str = 'down_proj'


MIXTRAL_NAMES = ExpertNames('layers.#.block_sparse_moe', gate='w1', up='w3', down='w2')


def experts(model: ModelConfig, names: ExpertNames) -> Iterator[LayerTensor]:
    """Yields the tensors of router, experts and shared experts of a layer without biases."""
    D, F, E = model.dim, model.expert_ffn_dim, model.num_experts
    yield _transposed(f'{names.module}.gate.weight', 'router.kernel', (D, E))
    if model.router_balance_bias:
        yield _plain(f'{names.module}.gate.e_score_correction_bias', 'router.balance_bias', (E,))
    shapes = {'gate': (D, F), 'up': (D, F), 'down': (F, D)}
    # All experts of a projection are consecutive, because its parameter contains all of them.
    for kind, shape in shapes.items():
        for expert in range(E):
            name = f'{names.module}.experts.{expert}.{getattr(names, kind)}.weight'
            yield _of_one_expert(name, f'experts.{kind}.kernel', shape, expert, E)
    if G := model.num_shared_experts * F:
        for kind, shape in {'gate': (D, G), 'up': (D, G), 'down': (G, D)}.items():
            name = f'{names.module}.shared_experts.{getattr(names, kind)}.weight'
            yield _transposed(name, f'shared.{kind}.kernel', shape)


def gpt_oss_experts(model: ModelConfig) -> Iterator[LayerTensor]:
    """Yields the tensors of router and experts of a layer of gpt-oss."""
    D, F, E = model.dim, model.expert_ffn_dim, model.num_experts
    yield _transposed('layers.#.mlp.router.weight', 'router.kernel', (D, E))
    yield _plain('layers.#.mlp.router.bias', 'router.bias', (E,))
    yield _alternating('layers.#.mlp.experts.gate_up_proj', 'kernel', (E, D, F))
    yield _alternating('layers.#.mlp.experts.gate_up_proj_bias', 'bias', (E, F))
    yield _plain('layers.#.mlp.experts.down_proj', 'experts.down.kernel', (E, F, D))
    yield _plain('layers.#.mlp.experts.down_proj_bias', 'experts.down.bias', (E, D))


def _plain(name: str, path: str, shape: Shape) -> LayerTensor:
    return LayerTensor(name, (f'{_PATH}.{path}',), shape, (shape,), lambda arrays: arrays[0], lambda array: [array])


def _transposed(name: str, path: str, shape: Shape) -> LayerTensor:
    sources = (f'{_PATH}.{path}',)
    return LayerTensor(name, sources, shape[::-1], (shape,), lambda arrays: arrays[0].T, lambda array: [array.T])


def _of_one_expert(name: str, path: str, shape: Shape, expert: int, num_experts: int) -> LayerTensor:
    return LayerTensor(
        name,
        (f'{_PATH}.{path}',),
        shape[::-1],
        ((num_experts, *shape),),
        lambda arrays: arrays[0][expert].T,
        lambda array: [array.T],
        expert,
    )


def _alternating(name: str, kind: str, shape: Shape) -> LayerTensor:
    """Returns the tensor whose last axis has an element of the gate, then one of the up-projection, and so on."""
    joint = (*shape[:-1], 2 * shape[-1])
    return LayerTensor(
        name,
        (f'{_PATH}.experts.gate.{kind}', f'{_PATH}.experts.up.{kind}'),
        joint,
        (shape, shape),
        lambda arrays: np.stack(arrays, axis=-1).reshape(joint),
        lambda array: [array[..., ::2], array[..., 1::2]],
    )
