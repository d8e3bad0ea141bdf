"""Resolves the device mesh and checks that it fits the devices, the model and the batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from maxlm.config.schema import Config, MeshConfig
from maxlm.config.validation import divisors
from maxlm.errors import InputError

# A vocabulary that cannot be split evenly is padded to a multiple of this on each device: matrix units and vector
# lanes process such sizes without a remainder.
VOCABULARY_MULTIPLE = 128


def resolve_mesh(mesh: MeshConfig, num_devices: int) -> MeshConfig:
    """Returns the mesh with its -1 axis filled in for `num_devices` devices.

    Raises:
        InputError: the product of the axes is not the number of devices.
    """
    sizes: dict[str, Any] = dict(mesh.sizes)
    fixed = math.prod(max(size, 1) for size in sizes.values())
    axes = ' '.join(f'{axis}={size}' for axis, size in sizes.items() if size != 1) or 'with size 1 on every axis'
    working = _listed(divisors(num_devices))
    for axis, size in sizes.items():
        if size == -1:
            if num_devices % fixed:
                raise InputError(
                    f'mesh {axes}: the axes other than mesh.{axis} use {fixed} devices, which does not divide the '
                    f'{num_devices} available devices; choose sizes whose product is one of {working}'
                )
            sizes[axis] = num_devices // fixed
            fixed = num_devices
    if fixed != num_devices:
        raise InputError(
            f'mesh {axes} needs {fixed} devices, but {num_devices} are available; set one axis to -1, and the other '
            f'axes so that their product is one of {working}'
        )
    return dataclasses.replace(mesh, **sizes)


def padded_vocabulary(size: int, num_shards: int) -> int:
    """Returns `size` if `num_shards` divides it, otherwise the next multiple of VOCABULARY_MULTIPLE · num_shards."""
    multiple = VOCABULARY_MULTIPLE * num_shards
    return -(-size // multiple) * multiple if size % num_shards else size


def reduces_gradients_once(config: Config) -> bool:
    """Returns True if gradients are summed over devices once per step instead of once per micro-batch.

    This holds for data parallelism at ZeRO stage 1, at which each device stores the complete gradient sums. It does not
    hold with dropout, whose masks are drawn for the global micro-batch so that they do not depend on the mesh.
    """
    mesh = config.mesh
    return (
        mesh.zero_stage == 1
        and config.accumulation > 1
        and mesh.replica * mesh.data * mesh.fsdp > 1
        and mesh.stage == mesh.expert == mesh.context == mesh.tensor == 1
        and mesh.host_offload == 'none'
        and not config.model.dropout
        # The load-balancing loss depends on the micro-batch of all devices.
        and not config.model.num_experts
    )


def check_layout(config: Config) -> None:
    """Checks a config with resolved mesh, batch and model.

    Raises:
        InputError: an axis of the mesh does not divide the dimension that it shards, or the mesh does not support
            `mesh.host_offload` or pipeline stages with this config.
    """
    mesh, model = config.mesh, config.model
    widths = ['ffn_dim'] if model.num_dense_layers or not model.num_experts else []
    widths += ['expert_ffn_dim'] if model.num_experts else []
    split = [(f'model.{key}', getattr(model, key)) for key in ('num_heads', 'num_kv_heads', *widths)]
    _check_axis(config, 'tensor', split)
    if model.num_experts:
        _check_axis(config, 'expert', [('model.num_experts', model.num_experts)])
    if mesh.context > 1:
        if model.attention_sinks:
            raise InputError(
                f'mesh.context={mesh.context} with model.attention_sinks=True: ring attention does not support '
                'attention sinks; set mesh.context=1'
            )
        if model.attention_softcap:
            raise InputError(
                f'mesh.context={mesh.context} with model.attention_softcap={model.attention_softcap}: ring attention '
                'has no soft cap of the scores; set mesh.context=1'
            )
        lengths = [('data.seq_len', config.data.seq_len)]
        lengths += [('a length of data.seq_len_schedule', length) for length, _ in config.data.seq_len_schedule]
        # For load balance, each device gets two chunks: one from the first half and one from the second half.
        _check_axis(config, 'context', lengths, pieces=2)
    if mesh.host_offload != 'none' and config.optimizer.name != 'adamw':
        raise InputError(
            f'mesh.host_offload={mesh.host_offload}: host offload requires optimizer.name=adamw, not '
            f'{config.optimizer.name}; set optimizer.name=adamw or mesh.host_offload=none'
        )
    if mesh.host_offload == 'all' and mesh.stage > 1:
        raise InputError(
            'mesh.host_offload=all: pipeline stages cannot offload their parameters; set mesh.host_offload=optimizer'
        )
    if model.mtp_depth and mesh.stage * mesh.context > 1:
        raise InputError(
            f'model.mtp_depth={model.mtp_depth} with mesh.stage={mesh.stage} and mesh.context={mesh.context}: '
            'multi-token prediction supports neither pipelines nor context parallelism; set both to 1, or '
            'model.mtp_depth=0'
        )
    if mesh.stage > 1:
        check_stages(config)
    elif mesh.num_pipeline_repeats > 1:
        raise InputError(
            f'mesh.num_pipeline_repeats={mesh.num_pipeline_repeats} requires pipeline stages; set it to 1, or set '
            'mesh.stage above 1'
        )


def _check_axis(config: Config, axis: str, wholes: list[tuple[str, int]], *, pieces: int = 1) -> None:
    """Checks that `pieces` times the size of the axis divides each of the named dimensions."""
    size = getattr(config.mesh, axis)
    for key, whole in wholes:
        if whole % (pieces * size):
            shared = math.gcd(*(number for _, number in wholes))
            working = [n for n in divisors(_num_devices(config)) if n == 1 or shared % (pieces * n) == 0]
            each = f' with {pieces} chunks per device' if pieces > 1 else ''
            raise InputError(
                f'mesh.{axis}={size}{each} does not divide {key}={whole}; on {_num_devices(config)} devices '
                f'mesh.{axis} can be {_listed(working)}'
            )


def check_stages(config: Config) -> None:
    """Checks that the pipeline stages divide the layers and the micro-batches of a step.

    Raises:
        InputError: they do not. The message lists numbers that do.
    """
    mesh, model = config.mesh, config.model
    # All stages have the first dense layers of a model with experts.
    layers = model.num_layers - model.num_dense_layers
    patterns = {key: len(getattr(model, key)) for key in ('attention_pattern', 'value_embedding_pattern')}
    chunks, period = mesh.stage * mesh.num_pipeline_repeats, model.layer_period
    if layers % (chunks * period):
        periods = layers // period if layers % period == 0 else 0
        working = [
            f'{stage} × {repeats}'
            for stage in divisors(periods)
            for repeats in divisors(periods // stage)
            if stage > 1 and _num_devices(config) % stage == 0
        ]
        dense = f' without model.num_dense_layers={model.num_dense_layers}' if model.num_dense_layers else ''
        repeated = ' and '.join(f'model.{key}' for key, length in patterns.items() if length > 1)
        needs = f', each a multiple of the {period} of {repeated}' if period > 1 else ''
        raise InputError(
            f'mesh.stage={mesh.stage} × mesh.num_pipeline_repeats={mesh.num_pipeline_repeats} does not split '
            f'model.num_layers={model.num_layers}{dense} into equal parts{needs}; use one of: '
            f'{", ".join(working[:12]) or "1 × 1"}'
        )
    if config.accumulation % mesh.stage:
        global_batch, shards = config.train.global_batch_size, config.batch_shards
        per_device = global_batch // shards
        sizes = [micro for micro in divisors(per_device) if per_device // micro % mesh.stage == 0]
        right = f'values that work with train.global_batch_size={global_batch}: {_listed(sizes)}'
        if not sizes:
            multiple = shards * mesh.stage
            nearest = max(1, round(global_batch / multiple)) * multiple
            right = (
                f'no value works with train.global_batch_size={global_batch}; set train.per_device_batch_size=1 and '
                f'train.global_batch_size={nearest}'
            )
        raise InputError(
            f'train.per_device_batch_size={config.train.per_device_batch_size} gives {config.accumulation} '
            f'micro-batches per step, but a pipeline with mesh.stage={mesh.stage} needs a multiple of {mesh.stage}; '
            f'{right}'
        )


def _num_devices(config: Config) -> int:
    return math.prod(config.mesh.sizes.values())


def _listed(numbers: list[int]) -> str:
    return ', '.join(map(str, numbers))
