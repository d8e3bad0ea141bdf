"""Sizes of mixture-of-experts layers on one device: kinds of layers, rows of experts, and their memory.

Shapes, per device: N tokens, k experts per token, A = N·k assignments, R rows, D width, F width of an expert,
E experts, P devices that exchange rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from maxlm.config.schema import Config, ModelConfig
from maxlm.model.experts.grouped_matmul import block_size, padded_rows
from maxlm.model.parameters import expert_parameters, layer_stacks, model_parameters

# Float32 arrays of the router, with one element per token and expert, in the backward pass of a layer.
ROUTER_ARRAYS = 3
# Arrays [R, D] in the backward pass of a layer. Read off programs for TPU v5p.
ROW_ARRAYS = 3.0


class ExpertRows(NamedTuple):
    """Numbers of rows of a layer with experts, for one micro-batch on a device.

    Attributes:
        assigned: rows that tokens use, if the loads of the devices are equal.
        stored: rows of the arrays that experts read and write.
        sent: rows of the arrays that devices exchange; 0 without `mesh.expert`.
        multiplied: rows of the matrix products.
    """

    assigned: float
    stored: float
    sent: float
    multiplied: float


NO_ROWS = ExpertRows(0, 0, 0, 0)


def layers_on_device(config: Config) -> list[tuple[ModelConfig, float]]:
    """Returns the model of each kind of layer, and the number of its layers on a device; see `layer_stacks`.

    Every stage of a pipeline has all of the first dense layers. The blocks of modules of multi-token prediction, which
    pipelines do not support, are of the last kind.
    """
    return [
        (kind, kind.num_layers / (1 if is_first(config, kind) else config.mesh.stage) + num_modules(config, kind))
        for kind in layer_stacks(config.model)
    ]


def layer_runs(config: Config) -> list[tuple[ModelConfig, float]]:
    """Returns the model of each kind of layer, and how often a device runs such a layer in a step, in one direction.

    In a pipeline a device runs one chunk of its layers in every iteration. Blocks of modules of multi-token prediction
    count as layers.
    """
    mesh, micro_batches = config.mesh, config.accumulation
    chunks = mesh.stage * mesh.num_pipeline_repeats
    iterations = micro_batches if mesh.stage == 1 else mesh.num_pipeline_repeats * micro_batches + mesh.stage - 1
    return [
        (
            kind,
            kind.num_layers * micro_batches
            if is_first(config, kind)
            else kind.num_layers / chunks * iterations + num_modules(config, kind) * micro_batches,
        )
        for kind in layer_stacks(config.model)
    ]


def num_modules(config: Config, kind: ModelConfig) -> int:
    """Returns the number of modules of multi-token prediction whose blocks are of this kind."""
    return 0 if is_first(config, kind) else config.model.mtp_depth


def is_first(config: Config, kind: ModelConfig) -> bool:
    """Returns True for the first dense layers of a model with experts."""
    return config.model.num_experts > 0 and not kind.num_experts


def whole_parameters(config: Config) -> float:
    """Returns the elements of matrices and tables on a device without the sharding that only saves memory."""
    mesh, experts = config.mesh, expert_parameters(config.model)
    elsewhere = experts - experts / mesh.expert
    return (model_parameters(config.model) - elsewhere) / (mesh.stage * mesh.tensor)


def rows_of(config: Config, kind: ModelConfig) -> ExpertRows:
    """Returns the rows of a layer; see `maxlm.model.experts.dispatch`. A dense layer has none."""
    if not kind.num_experts:
        return NO_ROWS
    mesh, E, k = config.mesh, kind.num_experts, kind.num_experts_per_token
    length = config.data.seq_len / mesh.context
    N = round(config.train.per_device_batch_size * length)
    if kind.expert_capacity_factor:
        capacity = math.ceil(kind.expert_capacity_factor * length * k / E)
        rows = config.train.per_device_batch_size * E * capacity
        return ExpertRows(min(rows, N * k), rows, rows * (mesh.expert > 1), rows)
    sent = 0 if mesh.expert == 1 else mesh.expert * N * min(k, E // mesh.expert)
    block = block_size(N * k, E, kind.expert_matmul)
    stored = padded_rows(sent or N * k, E // mesh.expert, block)
    return ExpertRows(N * k, stored, sent, stored if kind.expert_matmul == 'loop' else N * k)


def dispatch_bytes(config: Config, kind: ModelConfig) -> float:
    """Returns the bytes that the forward pass of a layer reads and writes to move tokens to experts and back.

    Tokens are copied to rows, and rows are copied back and added (5 copies of rows or assignments). An exchange copies
    its arrays twice more in each direction. The router's logits are read by the scores, the selection and the
    statistics, in float32.
    """
    if not kind.num_experts:
        return 0.0
    rows = rows_of(config, kind)
    width = jnp.dtype(kind.dtype).itemsize
    of_router = 16 * _tokens(config) * kind.num_experts
    return width * kind.dim * (3 * rows.assigned + 2 * rows.stored + 4 * rows.sent) + of_router


def rows_per_token(config: Config, rows: float) -> float:
    """Returns a number of rows relative to the tokens of a micro-batch."""
    return rows / _tokens(config)


def activation_dim(config: Config, kind: ModelConfig) -> float:
    """Returns the elements of an input of the activation, per token on a device, including unused rows of experts."""
    if not kind.num_experts:
        return kind.ffn_dim / config.mesh.tensor
    rows = rows_per_token(config, rows_of(config, kind).stored)
    return (rows + kind.num_shared_experts) * kind.expert_ffn_dim / config.mesh.tensor


def backward_bytes(config: Config, kind: ModelConfig, ffn: float, platform: str) -> float:
    """Returns the bytes of temporary arrays in the backward pass of a layer's experts.

    Args:
        config: config of the run.
        kind: model with only this kind of layers.
        ffn: number of arrays of the feed-forward's width; see `Backend`.
        platform: platform of the devices.
    """
    if not kind.num_experts:
        return 0.0
    rows, width = rows_of(config, kind), jnp.dtype(kind.dtype).itemsize
    inner = ffn * kind.expert_ffn_dim / config.mesh.tensor
    of_rows = rows.stored * (inner + ROW_ARRAYS * kind.dim)
    if platform == 'gpu' and kind.expert_matmul == 'ragged_dot' and not kind.expert_capacity_factor:
        # XLA expands the rows to all experts. Read off a program for H100.
        expanded = rows.stored * kind.num_experts / config.mesh.expert
        of_rows += expanded * (2 * kind.dim + kind.expert_ffn_dim / config.mesh.tensor)
    return width * of_rows + 4 * ROUTER_ARRAYS * _tokens(config) * kind.num_experts


def _tokens(config: Config) -> float:
    """Returns the number of tokens of a micro-batch on a device."""
    return config.train.per_device_batch_size * config.data.seq_len / config.mesh.context
