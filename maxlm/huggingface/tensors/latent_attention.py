"""Maps the attention tensors of DeepSeek-V3 to the parameters of latent attention.

DeepSeek rotates adjacent pairs (2i, 2i + 1) of the rotated dims, maxlm the pairs (i, i + R/2). The rows of queries and
keys are therefore reordered, which is exact in both directions.

Shapes: D dim, N heads, C kv_lora_rank, Q q_lora_rank, P head dim without rotary positions, R head dim with rotary
positions, V value head dim, I inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.huggingface.tensors.layer_tensor import LayerTensor, Shape

_PREFIX, _PATH = 'layers.#.self_attn', 'blocks.attention'


def latent_attention(model: ModelConfig) -> Iterator[LayerTensor]:
    """Yields the tensors of the attention of a resolved model with latent attention."""
    D, N, C, Q = model.dim, model.num_heads, model.kv_lora_rank, model.q_lora_rank
    P, R, V = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    if Q:
        yield _kernel('q_a_proj', 'query_latent', (D, Q))
        yield from _norm('q_a_layernorm', 'query_latent_norm', model, Q)
        yield _kernel('q_b_proj', 'query', (Q, N, P + R), rotated=R)
    else:
        yield _kernel('q_proj', 'query', (D, N, P + R), rotated=R)
    yield _kernel('kv_a_proj_with_mqa', 'key_value_latent', (D, C + R), rotated=R)
    yield from _norm('kv_a_layernorm', 'key_value_latent_norm', model, C)
    yield _keys_and_values(C, N, P, V)
    yield LayerTensor(
        f'{_PREFIX}.o_proj.weight',
        (f'{_PATH}.out.kernel',),
        (D, N * V),
        ((N, V, D),),
        lambda arrays: arrays[0].reshape(N * V, D).T,
        lambda array: [array.T.reshape(N, V, D)],
    )


def _kernel(name: str, path: str, shape: Shape, *, rotated: int = 0) -> LayerTensor:
    """Returns the tensor [outputs, I] of a kernel [I, ...outputs], of whose last dims `rotated` are rotated."""
    return LayerTensor(
        f'{_PREFIX}.{name}.weight',
        (f'{_PATH}.{path}.kernel',),
        (int(np.prod(shape[1:])), shape[0]),
        (shape,),
        lambda arrays: _interleaved(arrays[0], rotated).reshape(shape[0], -1).T,
        lambda array: [_split_in_halves(array.T.reshape(shape), rotated)],
    )


def _keys_and_values(C: int, N: int, P: int, V: int) -> LayerTensor:
    """Returns the tensor with the rows of keys and values of head 0, then of head 1, and so on."""

    def to_hf(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays, axis=-1).reshape(C, N * (P + V)).T

    def from_hf(array: np.ndarray) -> Sequence[np.ndarray]:
        return np.split(array.T.reshape(C, N, P + V), [P], axis=-1)

    sources = (f'{_PATH}.key.kernel', f'{_PATH}.value.kernel')
    return LayerTensor(f'{_PREFIX}.kv_b_proj.weight', sources, (N * (P + V), C), ((C, N, P), (C, N, V)), to_hf, from_hf)


def _norm(name: str, path: str, model: ModelConfig, dim: int) -> Iterator[LayerTensor]:
    if model.norm_use_scale:
        yield LayerTensor(
            f'{_PREFIX}.{name}.weight',
            (f'{_PATH}.{path}.scale',),
            (dim,),
            ((dim,),),
            lambda arrays: arrays[0],
            lambda array: [array],
        )


def _split_in_halves(array: np.ndarray, rotated: int) -> np.ndarray:
    """Moves the first elements of the adjacent pairs at the end of the last axis before the second elements."""
    rest = array.shape[-1] - rotated
    return np.concatenate([array[..., :rest], array[..., rest::2], array[..., rest + 1 :: 2]], axis=-1)


def _interleaved(array: np.ndarray, rotated: int) -> np.ndarray:
    """Inverts `_split_in_halves`."""
    rest = array.shape[-1] - rotated
    first, second = np.split(array[..., rest:], 2, axis=-1)
    pairs = np.stack([first, second], axis=-1).reshape(*array.shape[:-1], rotated)
    return np.concatenate([array[..., :rest], pairs], axis=-1)
