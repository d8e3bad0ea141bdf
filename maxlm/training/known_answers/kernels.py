"""Kernels that a training step or a server uses on its devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from maxlm.config.mesh import padded_vocabulary
from maxlm.config.schema import Config, MeshConfig, ModelConfig
from maxlm.model.layers.masks import layer_windows
from maxlm.training.known_answers.answer import KnownAnswer
from maxlm.training.known_answers.attention import attention_answer, cache_answer
from maxlm.training.known_answers.experts import experts_answer
from maxlm.training.known_answers.fp8_rounding import fp8_rounding_answer
from maxlm.training.known_answers.layers import activation_answer, norm_answer, product_answer
from maxlm.training.known_answers.loss import loss_answer
from maxlm.training.known_answers.residual_norm import residual_norm_answer

# Largest number of rows of matrices, so that formulas in float32 need little memory.
MAX_ROWS = 4096
# Rows of a decoding call, and largest number of slots of its cache.
DECODED_ROWS, MAX_SLOTS = 8, 8192


def training_settings(config: Config) -> tuple[Any, ...]:
    """Returns all settings of a resolved config on which `training_answers` depends."""
    data, train = config.data, config.train
    sizes = (data.seq_len, data.document_mask, train.per_device_batch_size, train.loss_chunk_tokens, train.z_loss)
    return config.model, config.mesh, *sizes


def training_answers(config: Config) -> list[KnownAnswer]:
    """Returns the kernels of the steps of a resolved config, with the sizes that they have on one device.

    Attention over a sharded sequence (mesh.context) is not tested.
    """
    model, mesh = config.model, config.mesh
    tokens = config.train.per_device_batch_size * config.data.seq_len // mesh.context
    answers = [] if mesh.context > 1 else list(attention_answers(config).values())
    vocab_size = padded_vocabulary(model.vocab_size, mesh.tensor) // mesh.tensor
    answers.append(loss_answer(config, tokens=tokens, vocab_size=vocab_size))
    answers += _layers(model, mesh, min(tokens, MAX_ROWS))
    if model.fp8_kernel == 'pallas':
        answers.append(fp8_rounding_answer(model, min(tokens, MAX_ROWS), model.ffn_dim))
    if model.num_experts and not model.expert_capacity_factor:
        answers += _experts(model, mesh)
    return answers


def attention_answers(config: Config) -> dict[int, KnownAnswer]:
    """Returns the attention of the steps of a resolved config, by the window of a layer."""
    return {
        window: attention_answer(
            config.model,
            rows=config.train.per_device_batch_size,
            length=config.data.seq_len,
            window=window,
            has_documents=config.data.document_mask,
            heads=_heads(config.model, config.mesh),
            is_pipelined=config.mesh.stage > 1,
        )
        for window in sorted(set(layer_windows(config.model)))
    }


def serving_answers(config: Config, *, max_context: int, int8_cache: bool) -> list[KnownAnswer]:
    """Returns the kernels of an engine with a resolved config, with the sizes that they have on one device.

    The cache of latent attention is not tested.
    """
    model, mesh = config.model, config.mesh
    answers = []
    if not model.kv_lora_rank:
        heads = _heads(model, mesh)
        slots = min(max_context, MAX_SLOTS)
        answers.append(cache_answer(model, rows=DECODED_ROWS, slots=slots, int8=int8_cache, heads=heads))
    answers += _layers(model, mesh, DECODED_ROWS)
    return answers + (list(_experts(model, mesh)) if model.num_experts else [])


def _layers(model: ModelConfig, mesh: MeshConfig, rows: int) -> Iterator[KnownAnswer]:
    width = (model.expert_ffn_dim if model.num_experts and not model.num_dense_layers else model.ffn_dim) // mesh.tensor
    yield product_answer(model, rows, model.dim, width)
    yield product_answer(model, rows, width, model.dim)
    yield residual_norm_answer(model, rows) if model.norm_kernel == 'pallas' else norm_answer(model, rows)
    yield activation_answer(model, rows, width)


def _experts(model: ModelConfig, mesh: MeshConfig) -> Iterator[KnownAnswer]:
    width = model.expert_ffn_dim // mesh.tensor
    yield experts_answer(model, model.dim, width)
    yield experts_answer(model, width, model.dim)


def _heads(model: ModelConfig, mesh: MeshConfig) -> tuple[int, int]:
    """Returns the numbers of query heads and key/value heads on one device."""
    kv_heads = model.num_heads if model.kv_lora_rank else model.num_kv_heads
    return model.num_heads // mesh.tensor, kv_heads // mesh.tensor
