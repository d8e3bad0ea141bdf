"""Estimates the collectives of one step by formula, matching programs that XLA compiled for GPUs.

Sizes use the dtype that is sent. Parameters and gradients have the compute dtype, and parameters of blocks with 8-bit
products have 8 bits. The gradient of the output projection is float32, because it is summed over the chunks of the
loss.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from maxlm.config.mesh import padded_vocabulary, reduces_gradients_once
from maxlm.config.schema import MESH_AXES, Config, ModelConfig
from maxlm.model.parameters import (
    Tables,
    block_kernels,
    block_parameters,
    layer_stacks,
    model_parameters,
    tables,
    value_elements,
)
from maxlm.model.stream import num_states
from maxlm.planning.estimate.experts import layer_runs, layers_on_device, num_modules, rows_of
from maxlm.planning.estimate.transfers import Transfer
from maxlm.training.flops import RECOMPUTED

# Axes along which devices process different tokens, so that gradients are summed over them.
BATCH_AXES = ('replica', 'data', 'fsdp', 'expert', 'context')
# Axes over which ZeRO shards the state, and the part of them that shards the state of experts.
SAVING_AXES, EXPERT_SAVING_AXES = ('fsdp', 'expert', 'context'), ('fsdp', 'context')
FLOAT32 = 4


def estimate_transfers(config: Config) -> list[Transfer]:
    """Returns the transfers of one optimizer step of a resolved config."""
    transfers = [
        *_gathers(config),
        *_gradients(config),
        *_tensor_sums(config),
        *_experts(config),
        *_vocabulary(config),
        *_scales(config),
        *_ring(config),
        *_pipeline(config),
        *_muon(config),
        *_teacher(config),
        # Loss, number of tokens, norms.
        _transfer(config, 'all-reduce', MESH_AXES, FLOAT32, 4, is_async=False),
    ]
    return [transfer for transfer in transfers if transfer.group > 1 and transfer.size * transfer.count > 0]


def _transfer(
    config: Config, kind: str, axes: tuple[str, ...], size: float, count: float, *, is_async: bool = True
) -> Transfer:
    sizes = config.mesh.sizes
    axes = tuple(axis for axis in axes if sizes[axis] > 1)
    return Transfer(kind, axes, math.prod(sizes[axis] for axis in axes), size, count, is_async)


def _width(config: Config) -> int:
    return jnp.dtype(config.model.dtype).itemsize


def _layers(config: Config) -> float:
    """Returns the number of layers that a device runs in a step, in one direction."""
    return sum(runs for _, runs in layer_runs(config))


class _Kernels(NamedTuple):
    """Kernels that are sharded over the same axes.

    Attributes:
        size: elements that a device uses at the same time.
        saving_axes: axes over which ZeRO shards them.
        is_float32: they are used in float32.
    """

    size: float
    saving_axes: tuple[str, ...]
    is_float32: bool = False


def _kernels(config: Config, kind: ModelConfig) -> list[_Kernels]:
    """Returns the kernels of a block: all except those of experts, those of experts, and the router's."""
    kernels, mesh = block_kernels(kind), config.mesh
    experts = sum(kernel.size for kernel in kernels.values() if kernel.is_of_experts)
    router = kernels['router'].size if 'router' in kernels else 0
    others = sum(kernel.size for kernel in kernels.values()) - experts - router
    found = [
        _Kernels(others / mesh.tensor, SAVING_AXES),
        _Kernels(experts / mesh.tensor / mesh.expert, EXPERT_SAVING_AXES),
        _Kernels(router, SAVING_AXES, is_float32=True),
    ]
    return [each for each in found if each.size]


def _stream_bytes(config: Config) -> float:
    """Returns the bytes of the residual stream of a micro-batch on a device."""
    return (
        config.train.per_device_batch_size
        * config.data.seq_len
        / config.mesh.context
        * config.model.dim
        * _width(config)
    )


def _gathers(config: Config) -> list[Transfer]:
    """Returns gathers of parameters before use; below ZeRO stage 3, once per step."""
    model, mesh, width = config.model, config.mesh, _width(config)
    if mesh.zero_stage < 3 and mesh.host_offload != 'all':
        of_fp8 = FLOAT32 if model.fp8_scaling == 'current' else 1
        per_matrix = of_fp8 if model.matmul_precision == 'fp8' else width
        all_blocks = [(each, kind.num_layers) for kind in layer_stacks(model) for each in _kernels(config, kind)]
        rest = model_parameters(model) - sum(kind.num_layers * block_parameters(kind) for kind in layer_stacks(model))
        sizes: dict[tuple[str, ...], float] = {SAVING_AXES: FLOAT32 * rest / (mesh.tensor * mesh.stage)}
        for each, layers in all_blocks:
            size = (FLOAT32 if each.is_float32 else per_matrix) * layers * each.size / mesh.stage
            sizes[each.saving_axes] = sizes.get(each.saving_axes, 0) + size
        return [_transfer(config, 'all-gather', axes, size, 1, is_async=False) for axes, size in sizes.items()]
    # Without rematerialization, XLA keeps a block's parameters from the forward to the backward pass.
    directions = 1 if model.remat_policy == 'none' and mesh.stage == 1 else 2
    of = _padded_tables(config)
    per_matrix = 1 if model.matmul_precision == 'fp8' else width
    # A table that also serves as the output projection is gathered twice. Each module of multi-token prediction gathers
    # the output projection again.
    all_weights = width * (of.positions + of.tokens + (1 + model.mtp_depth) * (of.head or of.tokens))
    blocks = [
        _transfer(
            config,
            'all-gather',
            each.saving_axes,
            (FLOAT32 if each.is_float32 else per_matrix) * each.size,
            # XLA gathers the block of a module, which is not in a loop, for its recomputation and again for its
            # gradients.
            directions * runs + (directions - 1) * num_modules(config, kind) * config.accumulation,
        )
        for kind, runs in layer_runs(config)
        for each in _kernels(config, kind)
    ]
    projections = width * _projection_elements(model)
    return [
        *blocks,
        _transfer(config, 'all-gather', SAVING_AXES, projections, directions * config.rounds),
        _transfer(config, 'all-gather', SAVING_AXES, all_weights / mesh.tensor, config.rounds),
        # Each layer gathers its own table of value embeddings.
        _transfer(config, 'all-gather', SAVING_AXES, width * _values(config, of), directions * config.rounds),
    ]


def _projection_elements(model: ModelConfig) -> int:
    """Returns the elements of the projections of multi-token prediction, which `mesh.tensor` does not shard."""
    return model.mtp_depth * 2 * model.dim**2


def _gradients(config: Config) -> list[Transfer]:
    """Returns gradient sums over devices with different tokens, one per micro-batch, since XLA does not defer them.

    Some configs reduce float32 sums once per step; see `reduces_gradients_once`.
    """
    model, mesh, width = config.model, config.mesh, _width(config)
    if reduces_gradients_once(config):
        size: float = FLOAT32 * model_parameters(model)
        return [
            _transfer(config, 'reduce-scatter', ('fsdp',), size, 1, is_async=False),
            _transfer(config, 'all-reduce', ('replica', 'data'), size / mesh.fsdp, 1, is_async=False),
        ]
    of = _padded_tables(config)
    tokens, both = of.tokens / mesh.tensor, (of.tokens + of.positions) / mesh.tensor
    head = (of.head or of.tokens) / mesh.tensor
    sums: list[tuple[float, tuple[str, ...], float]] = [
        ((FLOAT32 if each.is_float32 else width) * each.size, each.saving_axes, runs)
        for kind, runs in layer_runs(config)
        for each in _kernels(config, kind)
    ]
    # Each module of multi-token prediction has a gradient of the head. All of them have one of the embedding.
    looked_up = both + _values(config, of) + (tokens if model.mtp_depth else 0)
    sums += [
        (FLOAT32 * head * (1 + model.mtp_depth), SAVING_AXES, config.rounds),
        (width * (looked_up + _projection_elements(model)), SAVING_AXES, config.rounds),
    ]
    transfers = []
    for size, axes, count in sums:
        saved_over = math.prod(mesh.sizes[axis] for axis in axes)
        if mesh.zero_stage >= 2 and saved_over > 1:
            transfers.append(_transfer(config, 'reduce-scatter', axes, size, count))
            transfers.append(_transfer(config, 'all-reduce', ('replica', 'data'), size / saved_over, count))
        else:
            transfers.append(_transfer(config, 'all-reduce', ('replica', 'data', *axes), size, count))
    return transfers


def _tensor_sums(config: Config) -> list[Transfer]:
    """Returns the sums of the residual stream and of its gradient, after each half of a block and for the tables.

    They block the device, because the next operation needs the sum.
    """
    model, mesh = config.model, config.mesh
    stream = _stream_bytes(config)
    tables_stream = stream * config.accumulation / config.rounds
    # The embedding lookup and the gradient of the hidden states, again for each module of multi-token prediction.
    sums = 2 * (1 + model.mtp_depth) * config.rounds
    transfers = [_transfer(config, 'all-reduce', ('tensor',), tables_stream, sums, is_async=False)]
    # The rows of value embeddings, and their gradients.
    rows = stream / model.dim * value_elements(model) / mesh.stage
    passes = (2 + (model.remat_policy != 'none')) * config.accumulation
    transfers.append(_transfer(config, 'all-reduce', ('tensor',), rows, passes, is_async=False))
    for kind, runs in layer_runs(config):
        # With a parallel residual, the two halves are added before they are summed over devices. Experts and shared
        # experts are summed separately.
        separate = kind.num_experts > 0 and (kind.parallel_residual or kind.num_shared_experts > 0)
        halves = (1 if kind.parallel_residual else 2) + separate
        # The last half is not recomputed, except in modules; see `maxlm.planning.estimate.work`.
        recomputes = model.remat_policy in RECOMPUTED
        again = (halves - 1) * recomputes + halves * (mesh.stage > 1)
        count = (2 * halves + again) * runs + recomputes * num_modules(config, kind) * config.accumulation
        transfers.append(_transfer(config, 'all-reduce', ('tensor',), stream, count, is_async=False))
    return transfers


def _experts(config: Config) -> list[Transfer]:
    """Returns the exchanges of rows between the devices of different experts, and sums of the routers' statistics.

    Rows are sent to the experts and back, and so are their gradients. Devices wait for them. A policy other than
    `none` recomputes the exchange. Without a capacity, each row is sent with the index of its expert.
    """
    model, width = config.model, _width(config)
    transfers = []
    for kind, runs in layer_runs(config):
        if not kind.num_experts:
            continue
        rows = rows_of(config, kind)
        is_sent_whole = bool(kind.expert_capacity_factor) or kind.expert_matmul == 'loop'
        size = width * kind.dim * (rows.sent if is_sent_whole else rows.assigned)
        forwards = 1 + (model.remat_policy != 'none') + (config.mesh.stage > 1)
        indices = 0 if kind.expert_capacity_factor else 4 * rows.sent
        transfers += [
            _transfer(config, 'all-to-all', ('expert',), size, (2 * forwards + 2) * runs, is_async=False),
            _transfer(config, 'all-to-all', ('expert',), indices, forwards * runs, is_async=False),
            # The load of each expert, and the mean probabilities.
            _transfer(config, 'all-reduce', BATCH_AXES, FLOAT32 * kind.num_experts, 2 * runs, is_async=False),
        ]
    return transfers


def _vocabulary(config: Config) -> list[Transfer]:
    """Returns transfers between vocabulary and width shards, for lookup and head, if the vocabulary is padded."""
    model, mesh, width = config.model, config.mesh, _width(config)
    of = _padded_tables(config)
    if of == tables(model):
        return []
    saved_over = mesh.fsdp * mesh.expert * mesh.context
    table = of.tokens / mesh.tensor / (saved_over if mesh.zero_stage == 3 else 1)
    gradient = of.tokens / mesh.tensor / (saved_over if mesh.zero_stage >= 2 else 1)
    return [
        _transfer(config, 'all-to-all', ('tensor',), size, config.rounds, is_async=False)
        for size in (width * table, width * table, width * gradient, FLOAT32 * gradient)
    ]


def _values(config: Config, of: Tables) -> float:
    """Returns the elements of the tables of value embeddings in the layers of a device."""
    return of.values / (config.mesh.tensor * config.mesh.stage)


def _padded_tables(config: Config) -> Tables:
    """Returns the tables with a padded vocabulary."""
    of, size = tables(config.model), padded_vocabulary(config.model.vocab_size, config.mesh.tensor)
    tokens, head, values = (elements // config.model.vocab_size * size for elements in (of.tokens, of.head, of.values))
    return of._replace(tokens=tokens, head=of.head if config.model.reward_head else head, values=values)


def _scales(config: Config) -> list[Transfer]:
    """Returns the reductions of the largest elements for 8-bit products: inputs, kernels and gradients of outputs.

    They block the device, but are small. None is repeated in the backward pass, because scales are saved. If gradients
    are reduced once per step, each device has its own scales, or with delayed scaling, its own largest elements.
    """
    if config.model.matmul_precision != 'fp8' or reduces_gradients_once(config):
        return []
    axes = (*BATCH_AXES, 'tensor')
    # An input of several kernels counts once.
    inputs, kernels = 4, len(block_kernels(config.model))
    # With delayed scaling, the kernels are quantized once per step, which is not counted.
    per_layer = inputs + (2 if config.model.fp8_scaling == 'current' else 1) * kernels
    return [_transfer(config, 'all-reduce', axes, FLOAT32, per_layer * _layers(config), is_async=False)]


def _ring(config: Config) -> list[Transfer]:
    """Returns the ring transfers of keys and values, and of their float32 gradients in the backward pass."""
    model, mesh = config.model, config.mesh
    tokens = config.train.per_device_batch_size * config.data.seq_len / mesh.context
    elements = 2 * tokens * model.num_kv_heads / mesh.tensor * model.head_dim
    directions = 2 + (model.remat_policy not in ('none', 'dots')) + (mesh.stage > 1)
    hops = (mesh.context - 1) * _layers(config)
    return [
        _transfer(config, 'collective-permute', ('context',), _width(config) * elements, directions * hops),
        _transfer(config, 'collective-permute', ('context',), FLOAT32 * elements, mesh.context * _layers(config)),
    ]


def _pipeline(config: Config) -> list[Transfer]:
    """Returns transfers of the stream and its gradient between stages, and reductions of the last stage's output."""
    if config.mesh.stage == 1:
        return []
    mesh, stream = config.mesh, num_states(config.model) * _stream_bytes(config)
    iterations = mesh.num_pipeline_repeats * config.accumulation + mesh.stage - 1
    return [
        _transfer(config, 'collective-permute', ('stage',), stream, 2 * iterations, is_async=False),
        _transfer(config, 'all-reduce', ('stage',), stream * config.accumulation, 2, is_async=False),
    ]


def _muon(config: Config) -> list[Transfer]:
    """Returns the transfers of Muon's matrices: `Layout.spread_matrices` moves one axis at a time."""
    if config.optimizer.name != 'muon':
        return []
    mesh, sizes, width = config.mesh, config.mesh.sizes, _width(config)
    transfers = []
    for kind, layers in layers_on_device(config):
        kernels = {name: kernel for name, kernel in block_kernels(kind).items() if name != 'router'}
        for are_experts in (False, True):
            group = [kernel for kernel in kernels.values() if kernel.is_of_experts == are_experts]
            if not group:
                continue
            spread = ('fsdp', 'context', 'tensor') if are_experts else ('fsdp', 'expert', 'context', 'tensor')
            parts = math.prod(sizes[axis] for axis in ('fsdp', 'expert', 'context', 'tensor'))
            size = width * layers * sum(kernel.size for kernel in group) / parts / len(group)
            for axis in (*spread, 'data'):
                # Along `data`, replicas slice locally on the way there, and gather on the way back.
                how, ways = ('all-gather', 1) if axis == 'data' else ('all-to-all', 2)
                transfers.append(_transfer(config, how, (axis,), size, ways * len(group), is_async=mesh.stage == 1))
    return transfers


def _teacher(config: Config) -> list[Transfer]:
    """Returns the transfers of the teacher's forward pass. Its parameters are sharded at every ZeRO stage."""
    if config.teacher is None:
        return []
    taught = dataclasses.replace(
        config.of_teacher,
        model=dataclasses.replace(config.teacher, remat_policy='none'),
        mesh=dataclasses.replace(config.mesh, zero_stage=3),
    )
    # Without rematerialization, half of these are in the forward pass.
    both = [*_tensor_sums(taught), *_experts(taught), *_vocabulary(taught), *_ring(taught)[:1], *_pipeline(taught)]
    # Below ZeRO stage 3, parameters are gathered once per step.
    times = 1 if config.mesh.zero_stage == 3 else config.accumulation
    return [
        *(transfer._replace(count=transfer.count / times) for transfer in _gathers(taught)),
        *(transfer._replace(count=transfer.count / 2) for transfer in both),
    ]
