"""Estimates the collectives of one step by formula, matching programs that XLA compiled for GPUs.

Sizes use the dtype that is sent. Parameters and gradients have the compute dtype, and parameters of blocks with 8-bit
products have 8 bits. The gradient of the output projection is float32, because it is summed over the chunks of the
loss.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from maxlm.config.mesh import padded_vocabulary, reduces_gradients_once
from maxlm.config.schema import MESH_AXES, Config
from maxlm.planning.estimate.parameters import Tables, block_kernels, block_parameters, model_parameters, tables
from maxlm.planning.estimate.transfers import Transfer

# Axes along which devices process different tokens, so that gradients are summed over them.
BATCH_AXES = ('replica', 'data', 'fsdp', 'context')
# Axes over which ZeRO shards the state.
SAVING_AXES = ('fsdp', 'context')
FLOAT32 = 4


def estimate_transfers(config: Config) -> list[Transfer]:
    """Returns the transfers of one optimizer step of a resolved config."""
    transfers = [
        *_gathers(config),
        *_gradients(config),
        *_tensor_sums(config),
        *_vocabulary(config),
        *_scales(config),
        *_ring(config),
        *_pipeline(config),
        *_muon(config),
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


def _iterations(config: Config) -> int:
    """Returns the number of times that a device runs its layers, or one chunk of them in a pipeline."""
    mesh, micro_batches = config.mesh, config.accumulation
    return micro_batches if mesh.stage == 1 else mesh.num_pipeline_repeats * micro_batches + mesh.stage - 1


def _layers(config: Config) -> float:
    """Returns the number of layers that a device runs in a step, in one direction."""
    return config.model.num_layers / (config.mesh.stage * config.mesh.num_pipeline_repeats) * _iterations(config)


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
        matrices = model.num_layers * block_parameters(model)
        per_matrix = FLOAT32 if model.matmul_precision == 'fp8' else width
        rest = model_parameters(model) - matrices
        size = (per_matrix * matrices + FLOAT32 * rest) / (mesh.tensor * mesh.stage)
        return [_transfer(config, 'all-gather', SAVING_AXES, size, 1, is_async=False)]
    # Without rematerialization, XLA keeps a block's parameters from the forward to the backward pass.
    directions = 1 if model.remat_policy == 'none' and mesh.stage == 1 else 2
    of = _padded_tables(config)
    # A table that also serves as the output projection is gathered twice.
    all_weights = width * (of.positions + of.tokens + (of.head or of.tokens))
    blocks = (1 if model.matmul_precision == 'fp8' else width) * block_parameters(model) / mesh.tensor
    return [
        _transfer(config, 'all-gather', SAVING_AXES, blocks, directions * _layers(config)),
        _transfer(config, 'all-gather', SAVING_AXES, all_weights / mesh.tensor, config.rounds),
    ]


def _gradients(config: Config) -> list[Transfer]:
    """Returns gradient sums over devices with different tokens, one per micro-batch, since XLA does not defer them.

    Some configs reduce float32 sums once per step; see `reduces_gradients_once`.
    """
    model, mesh, width = config.model, config.mesh, _width(config)
    if reduces_gradients_once(config):
        size = FLOAT32 * model_parameters(model)
        return [
            _transfer(config, 'reduce-scatter', ('fsdp',), size, 1, is_async=False),
            _transfer(config, 'all-reduce', ('replica', 'data'), size / mesh.fsdp, 1, is_async=False),
        ]
    of, saved_over = _padded_tables(config), mesh.fsdp * mesh.context
    scatters = mesh.zero_stage >= 2 and saved_over > 1
    sums = [
        (width * block_parameters(model), _layers(config)),
        (FLOAT32 * of.tokens, config.rounds),
        (width * (of.tokens + of.positions), config.rounds),
    ]
    transfers = []
    for size, count in sums:
        if scatters:
            transfers.append(_transfer(config, 'reduce-scatter', SAVING_AXES, size / mesh.tensor, count))
            part = size / mesh.tensor / saved_over
            transfers.append(_transfer(config, 'all-reduce', ('replica', 'data'), part, count))
        else:
            transfers.append(_transfer(config, 'all-reduce', BATCH_AXES, size / mesh.tensor, count))
    return transfers


def _tensor_sums(config: Config) -> list[Transfer]:
    """Returns the sums of the residual stream and of its gradient, after each half of a block and for the tables.

    They block the device, because the next operation needs the sum.
    """
    model, mesh = config.model, config.mesh
    # With a parallel residual, the two halves are added before they are summed over devices.
    halves = 1 if model.parallel_residual else 2
    # The last half is not recomputed; see `maxlm.planning.estimate.work`.
    again = (halves - 1) * (model.remat_policy in ('full', 'offload')) + halves * (mesh.stage > 1)
    stream = _stream_bytes(config)
    tables_stream = stream * config.accumulation / config.rounds
    return [
        _transfer(config, 'all-reduce', ('tensor',), stream, (2 * halves + again) * _layers(config), is_async=False),
        # The embedding lookup, and the gradient of the hidden states.
        _transfer(config, 'all-reduce', ('tensor',), tables_stream, 2 * config.rounds, is_async=False),
    ]


def _vocabulary(config: Config) -> list[Transfer]:
    """Returns transfers between vocabulary and width shards, for lookup and head, if the vocabulary is padded."""
    model, mesh, width = config.model, config.mesh, _width(config)
    of = _padded_tables(config)
    if of == tables(model):
        return []
    saved_over = mesh.fsdp * mesh.context
    table = of.tokens / mesh.tensor / (saved_over if mesh.zero_stage == 3 else 1)
    gradient = of.tokens / mesh.tensor / (saved_over if mesh.zero_stage >= 2 else 1)
    return [
        _transfer(config, 'all-to-all', ('tensor',), size, config.rounds, is_async=False)
        for size in (width * table, width * table, width * gradient, FLOAT32 * gradient)
    ]


def _padded_tables(config: Config) -> Tables:
    """Returns the tables with a padded vocabulary."""
    size = padded_vocabulary(config.model.vocab_size, config.mesh.tensor)
    return tables(dataclasses.replace(config.model, vocab_size=size))


def _scales(config: Config) -> list[Transfer]:
    """Returns the reductions of the largest elements for 8-bit products: inputs, kernels and gradients of outputs.

    They block the device, but are small. None is repeated in the backward pass, because scales are saved. If gradients
    are reduced once per step, each device has its own scales.
    """
    if config.model.matmul_precision != 'fp8' or reduces_gradients_once(config):
        return []
    axes = (*BATCH_AXES, 'tensor')
    # An input of several kernels counts once.
    inputs, kernels = 4, len(block_kernels(config.model))
    return [_transfer(config, 'all-reduce', axes, FLOAT32, (inputs + 2 * kernels) * _layers(config), is_async=False)]


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
    stream = _stream_bytes(config)
    return [
        _transfer(config, 'collective-permute', ('stage',), stream, 2 * _iterations(config), is_async=False),
        _transfer(config, 'all-reduce', ('stage',), stream * config.accumulation, 2, is_async=False),
    ]


def _muon(config: Config) -> list[Transfer]:
    """Returns the transfers of Muon's matrices: `Layout.spread_matrices` moves one axis at a time."""
    if config.optimizer.name != 'muon':
        return []
    mesh, sizes = config.mesh, config.mesh.sizes
    parts = math.prod(sizes[axis] for axis in ('stage', 'fsdp', 'context', 'tensor'))
    total = _width(config) * config.model.num_layers * block_parameters(config.model)
    num_kernels = len(block_kernels(config.model))
    transfers = []
    for axis in ('fsdp', 'context', 'tensor', 'data'):
        # Along `data`, replicas slice locally on the way there, and gather on the way back.
        kind, ways = ('all-gather', 1) if axis == 'data' else ('all-to-all', 2)
        size = total / parts / num_kernels
        transfers.append(_transfer(config, kind, (axis,), size, ways * num_kernels, is_async=mesh.stage == 1))
    return transfers
