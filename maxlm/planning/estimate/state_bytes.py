"""Computes the exact bytes of training state per device, from a config's shapes or from abstract arrays.

A search over many layouts uses the config, because tracing the state of each layout would take too long.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.config.schema import Config, MeshConfig
from maxlm.model.layers.weight_only_quantization import (
    CODE_DTYPES,
    CODES,
    KERNEL,
    SCALE_DTYPE,
    code_shapes,
    quantized_kernels,
    weights_of,
)
from maxlm.model.parameters import Weight, weights
from maxlm.parallel.host_offload import HOST
from maxlm.parallel.layout import SAVING, TABLE, splitting_axes
from maxlm.training.optimizers.muon import second_moment_shape
from maxlm.training.optimizers.quantized_moments import MIN_SIZE, num_blocks
from maxlm.training.optimizers.state_placement import state_axes, user_state_arrays
from maxlm.training.optimizers.trainable import is_trained
from maxlm.training.optimizers.user_optimizer import Parameter
from maxlm.training.reference import has_reference_params, reference_config, stored_dtype
from maxlm.training.state import TrainState


class StateBytes(NamedTuple):
    """Bytes per device. Arrays in host memory count only in `host`.

    Attributes:
        parameters: parameters, including those of a reference.
        moments: optimizer state.
        average: moving average of the parameters.
        host: arrays in host memory.
    """

    parameters: int
    moments: int
    average: int
    host: int


def state_bytes(abstract: TrainState) -> StateBytes:
    """Returns the bytes of a state whose leaves have shapes, dtypes and shardings."""
    device, host = {'parameters': 0, 'moments': 0, 'average': 0}, 0
    trees = {
        'parameters': (abstract.params, abstract.reference),
        'moments': abstract.opt_state,
        'average': abstract.ema,
    }
    for name, tree in trees.items():
        for leaf in jax.tree.leaves(tree):
            size = _shard_bytes(leaf)
            if leaf.sharding.memory_kind == HOST:
                host += size
            else:
                device[name] += size
    return StateBytes(**device, host=host)


def checkpoint_bytes(config: Config) -> int:
    """Returns the bytes of a checkpoint of a resolved config's run.

    They are those of the parameters, their EMA, the optimizer state and the pending rollouts.
    """
    unsharded = dataclasses.replace(config, mesh=MeshConfig(fsdp=1))
    return sum(planned_state_bytes(unsharded, with_reference=False)) + pending_bytes(config)


def pending_bytes(config: Config) -> int:
    """Returns the bytes of the pending rollouts of `grpo.max_staleness`, which each process has in its memory.

    A token has an id and a log-probability, and with tools or environments its origin; the prompts of environments are
    part of them. Their arrays have the columns of the longest response, here `grpo.max_completion_length`.
    """
    grpo = config.grpo
    if config.train.objective != 'grpo':
        return 0
    rows = grpo.max_staleness * grpo.prompts_per_rollout * grpo.num_generations
    of_responses = rows * grpo.max_completion_length * (9 if grpo.tools or grpo.environment else 8)
    of_prompts = rows * 4 * (config.data.seq_len - grpo.max_completion_length) if grpo.environment else 0
    return of_responses + of_prompts


def replay_bytes(config: Config) -> StateBytes:
    """Returns the bytes of the copy of the state for `guard.replay_fraction`; 0 without it."""
    if not config.guard.replay_fraction:
        return StateBytes(0, 0, 0, 0)
    return planned_state_bytes(config, with_reference=False)


def scorer_bytes(config: Config) -> int:
    """Returns the bytes per device of the parameters of the reward model of a resolved config's rollouts, if any."""
    if config.scorer is None:
        return 0
    other = config.of_scorer
    return sum(
        stored_bytes(other, weight, zero=3, width=stored_dtype(other, weight.kind).itemsize)
        for weight in weights(other.model)
    )


def planned_state_bytes(config: Config, *, with_reference: bool = True) -> StateBytes:
    """Returns the bytes of a resolved config's state from its shapes, without counters of maxlm (a few bytes)."""
    params = moments = reference = 0
    for weight in weights(config.model):
        params += stored_bytes(config, weight, zero=3)
        if is_trained(config, weight.name):
            moments += moment_bytes(config, weight)
    if config.optimizer.is_function:
        moments += _user_bytes(config, None)
    if with_reference and has_reference_params(config):
        other = reference_config(config)
        reference = sum(
            stored_bytes(other, weight, zero=3, width=stored_dtype(other, weight.kind).itemsize)
            for weight in weights(other.model)
        )
    average = params if config.optimizer.ema_decay else 0
    offload = config.mesh.host_offload
    if offload == 'all':
        return StateBytes(0, 0, 0, params + moments + average + reference)
    if offload == 'optimizer':
        return StateBytes(params + reference, 0, average, moments)
    return StateBytes(params + reference, moments, average, 0)


def is_quantized(weight: Weight) -> bool:
    """Returns True if a weight stands for the codes and scales of a quantized kernel."""
    return weight.name.endswith(CODES)


def stored_bytes(config: Config, weight: Weight, *, zero: int, width: int = 4) -> int:
    """Returns the bytes of a parameter's shard, with sharding at ZeRO stage `zero` and `width` bytes per element.

    A quantized kernel is stored as codes and scales, whatever the width.
    """
    if not is_quantized(weight):
        return width * shard_size(config, weight, zero=zero)
    quantization = weights_of(config.model)
    assert quantization is not None
    num_in = quantized_kernels(config.model)[f'{weight.name.rpartition(".")[0]}.{KERNEL}']
    # The axes of layers and experts precede the kernel.
    num_stacks = 1 + weight.is_of_experts
    stack, kernel = weight.shape[:num_stacks], weight.shape[num_stacks:]

    def size_of(shape: tuple[int, ...]) -> int:
        # As in `Linear.quantize_kernel`, axes that do not divide over their devices are replicated.
        pairs = zip(stack + shape, weight.axes, strict=True)
        axes = tuple('norm' if size % _num_shards(config, axis, 3) else axis for size, axis in pairs)
        return shard_size(config, weight._replace(shape=stack + shape, axes=axes), zero=zero)

    codes, scales = code_shapes(kernel, num_in, quantization)
    return np.dtype(CODE_DTYPES[quantization.kind]).itemsize * size_of(codes) + np.dtype(
        SCALE_DTYPE
    ).itemsize * size_of(scales)


def shard_size(config: Config, weight: Weight, *, zero: int) -> int:
    """Returns the elements of a weight's shard on one device, with sharding at ZeRO stage `zero`."""
    return math.prod(shard_shape(config, weight, zero=zero))


def shard_shape(config: Config, weight: Weight, *, zero: int) -> tuple[int, ...]:
    """Returns the shape of a weight's shard on one device."""
    return tuple(
        size // num_shards for size, num_shards in zip(weight.shape, _shards_by_axis(config, weight, zero), strict=True)
    )


def _shards_by_axis(config: Config, weight: Weight, zero: int) -> list[int]:
    """Returns the number of shards along each dimension of a weight."""
    axes = splitting_axes(weight.shape, weight.axes, lambda axis: _num_shards(config, axis, 3))
    return [math.prod(_num_shards(config, axis, zero) for axis in each) for each in axes]


def _num_shards(config: Config, axis: str, zero: int) -> int:
    if axis in SAVING and zero < 3:
        return 1
    sizes = config.mesh.sizes
    return math.prod(sizes[mesh_axis] for mesh_axis in TABLE[axis])


def moment_bytes(config: Config, weight: Weight) -> int:
    """Returns the bytes of a weight's optimizer state on one device."""
    optimizer = config.optimizer
    if optimizer.is_function:
        return _user_bytes(config, weight)
    # Muon has one moment for the matrices of the blocks, Adam two for every parameter.
    by_muon = optimizer.name == 'muon' and weight.kind == 'matrix'
    stored = optimizer.moment_dtype
    if weight.size < MIN_SIZE or (weight.kind == 'vector' and not by_muon):
        stored = 'float32'
    one = shard_size(config, weight, zero=3)
    if stored == 'int8':
        each = one + _scale_bytes(config, weight)
    else:
        each = one * (4 if stored == 'float32' else 2)
    if not by_muon:
        return 2 * each
    return each + (_second_moment_bytes(config, weight) if optimizer.muon_beta2 else 0)


def _second_moment_bytes(config: Config, weight: Weight) -> int:
    """Returns the bytes of Muon's second moments of a stack of matrices on one device."""
    param = Parameter(weight.name, weight.shape, np.dtype(np.float32), weight.axes, weight.kind)
    return 4 * _array_size(config, second_moment_shape(weight.shape, weight.axes), param)


def _array_size(config: Config, shape: tuple[int, ...], param: Parameter | None) -> int:
    """Returns the elements on one device of an array that has not the shape of its parameter."""
    axes = state_axes(shape, param, lambda axis: _num_shards(config, axis, 3))
    return math.prod(shape) // math.prod(_num_shards(config, axis, 3) for axis in axes)


def _user_bytes(config: Config, weight: Weight | None) -> int:
    """Returns the bytes of state of an optimizer of the user on one device, of a weight or of no weight."""
    trained = [each for each in weights(config.model) if is_trained(config, each.name)]
    float32 = np.dtype(np.float32)
    params = tuple(Parameter(each.name, each.shape, float32, each.axes, each.kind) for each in trained)
    total = 0
    for array in user_state_arrays(config.optimizer, params).get(weight.name if weight else '', ()):
        if weight and array.shape == weight.shape:
            size = shard_size(config, weight, zero=3)
        else:
            size = _array_size(config, array.shape, params[trained.index(weight)] if weight else None)
        total += size * array.dtype.itemsize
    return total


def _scale_bytes(config: Config, weight: Weight) -> int:
    """Returns the bytes of the scales, sharded as in `maxlm.training.optimizers.quantized_moments.place_moment`."""
    *rest, last = _shards_by_axis(config, weight, 3)
    number = num_blocks(weight.shape[-1])
    is_replicated = any(
        num_shards == 1 and size % last == 0 for size, num_shards in zip(weight.shape[:-1], rest, strict=True)
    )
    num_shards = math.prod(rest) * (last if number % last == 0 or is_replicated else 1)
    return 4 * math.prod(weight.shape[:-1]) * number // num_shards


def _shard_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
