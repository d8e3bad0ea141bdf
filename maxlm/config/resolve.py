"""Resolves the keys that depend on the machine and on the dataset: mesh, batch, run length, vocabulary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from maxlm.config.kernels import (
    attention_kernel,
    check_fp8_kernel,
    check_matmul,
    check_norm_kernel,
    expert_matmul,
    multiplies,
)
from maxlm.config.loading import build, default
from maxlm.config.mesh import check_layout, check_stages, resolve_mesh
from maxlm.config.schema import AUTO, UNDECIDED_STEPS, Config, MeshConfig, ModelConfig, TrainConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.config.sections.model import NO_FP8
from maxlm.config.sections.quantization import QUANTIZATION_GROUPS
from maxlm.config.validation import divides
from maxlm.errors import InputError, name_errors

# `data.seq_len` of a config that describes a model without a run.
_WINDOW = 1024


def resolve_batch(config: Config, mesh: MeshConfig) -> tuple[int, int]:
    """Returns the global batch size and the batch size per device for a resolved mesh.

    Raises:
        InputError: a batch cannot be split over the devices.
    """
    train = config.train
    global_batch = train.global_batch_size or train.global_batch_size_tokens // config.data.seq_len
    shards = mesh.replica * mesh.data * mesh.fsdp * mesh.expert
    if global_batch % shards:
        raise InputError(
            f'train.global_batch_size={global_batch} cannot be split over {shards} devices (mesh '
            f'replica·data·fsdp·expert); nearest: {max(1, round(global_batch / shards)) * shards}'
        )
    # `auto` chooses a divisor.
    micro_batch = 1 if train.per_device_batch_size == AUTO else train.per_device_batch_size or global_batch // shards
    if (global_batch // shards) % micro_batch:
        divides('train.per_device_batch_size', micro_batch, 'the sequences per device', global_batch // shards)
    return global_batch, micro_batch


def check_num_devices(config: Config, num_devices: int) -> None:
    """Checks that the mesh and the batch of a config that is not resolved fit to a number of devices.

    Raises:
        InputError: they do not. The message suggests values that work.
    """
    mesh = resolve_mesh(config.mesh, num_devices)
    global_batch, micro_batch = resolve_batch(config, mesh)
    if mesh.stage > 1:
        train = dataclasses.replace(config.train, global_batch_size=global_batch, per_device_batch_size=micro_batch)
        check_stages(dataclasses.replace(config, mesh=mesh, train=train))


def resolve(
    config: Config,
    *,
    platform: str,
    num_devices: int,
    vocab_size: int,
    windows: int | None,
    capability: tuple[int, int] | None = None,
    trained: tuple[int, int] = (0, 0),
) -> Config:
    """Fills in the keys that depend on the machine and on the dataset, so that they have explicit values.

    Args:
        config: result of `build`. train.per_device_batch_size is a number; `maxlm.planning.search` resolves 'auto'.
        platform: platform of the devices: cpu, gpu or tpu.
        num_devices: number of devices of the run.
        vocab_size: number of token ids of the dataset.
        windows: number of training sequences in one epoch of the dataset; None while it is being prepared.
        capability: (major, minor) compute capability of the GPUs, or None if unknown.
        trained: steps and sequences before the last change of the batch size.

    Raises:
        InputError: the values are inconsistent. The message suggests values that work.
    """
    mesh = resolve_mesh(config.mesh, num_devices)
    seq_len = config.data.seq_len
    train = config.train
    assert train.per_device_batch_size != AUTO, 'a size for train.per_device_batch_size=auto comes from planning'
    global_batch, micro_batch = resolve_batch(config, mesh)

    tokens_per_step = global_batch * seq_len
    if train.num_steps:
        num_steps = train.num_steps
    elif train.hours or train.dollars:
        num_steps = UNDECIDED_STEPS
    elif train.num_tokens:
        steps, sequences = trained
        num_steps = steps + max(0, -(-(train.num_tokens - sequences * seq_len) // tokens_per_step))
    elif windows is None:
        raise InputError(
            f'train.num_epochs={train.num_epochs:g}: the data is still being prepared, so the length of an epoch is '
            'unknown; set train.num_steps or train.num_tokens, or wait for the end of the preparation'
        )
    else:
        steps, sequences = trained
        num_steps = max(1, steps + round((train.num_epochs * windows - sequences) / global_batch))

    model = config.model
    if train.init_from and model.vocab_size:
        # The tables of the checkpoint grow; `maxlm.checkpoint.init_from` checks that the data extends its tokenizer.
        model = dataclasses.replace(model, vocab_size=max(model.vocab_size, vocab_size))
    if model.vocab_size and model.vocab_size < vocab_size:
        raise InputError(
            f'model.vocab_size={model.vocab_size} is below the vocabulary size {vocab_size} of dataset '
            f'{config.data.path}; set it to {vocab_size} or more, or to 0 to use the size of the dataset'
        )
    gated_dim = -(-model.dim * 8 // 3 // 128) * 128
    model = dataclasses.replace(
        model,
        vocab_size=model.vocab_size or vocab_size,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=model.head_dim or model.qk_nope_head_dim + model.qk_rope_head_dim or model.dim // model.num_heads,
        ffn_dim=model.ffn_dim or (gated_dim if model.activation in GATED_ACTIVATIONS else 4 * model.dim),
        max_positions=model.max_positions or seq_len,
        embedding_multiplier=model.embedding_multiplier or math.sqrt(model.dim),
        quantization_group_size=model.quantization_group_size or QUANTIZATION_GROUPS.get(model.weight_quantization, 0),
    )
    if model.num_experts:
        model = dataclasses.replace(
            model,
            expert_ffn_dim=model.expert_ffn_dim or model.ffn_dim,
            expert_matmul=expert_matmul(model.expert_matmul, platform, mesh),
        )
    model = dataclasses.replace(
        model,
        attention=attention_kernel(dataclasses.replace(config, model=model, mesh=mesh), platform, capability),
        original_max_positions=model.original_max_positions or round(model.max_positions / model.rope_scaling_factor),
    )
    optimizer = config.optimizer
    warmup_steps = optimizer.warmup_steps or -(-optimizer.warmup_tokens // tokens_per_step)
    config = dataclasses.replace(
        config,
        model=model,
        mesh=mesh,
        train=dataclasses.replace(
            train, num_steps=num_steps, global_batch_size=global_batch, per_device_batch_size=micro_batch
        ),
        optimizer=dataclasses.replace(optimizer, warmup_steps=warmup_steps),
    )
    check_layout(config)
    check_matmul(config, platform, capability)
    check_norm_kernel(config, platform)
    check_fp8_kernel(config, platform)
    return dataclasses.replace(
        config,
        teacher=_resolved_teacher(config, platform, capability),
        scorer=_resolved_scorer(config, platform, capability),
    )


def _resolved_teacher(config: Config, platform: str, capability: tuple[int, int] | None) -> ModelConfig | None:
    """Returns the model of a resolved config's teacher as the step computes it: in the dtype of the run.

    Raises:
        InputError: the teacher does not fit to the vocabulary, the sequence length or the mesh of the run.
    """
    assert bool(config.distill.teacher) == (config.teacher is not None), 'see `with_frozen_models`'
    if config.distill.logits_dir and not config.distill.top_k:
        raise InputError(
            f'distill.top_k=0 with distill.logits_dir={config.distill.logits_dir}: set it to the number of stored '
            'tokens for each position (--top-k of `maxlm distill`) or less'
        )
    if config.teacher is None:
        return None
    key, teacher = f'distill.teacher={config.distill.teacher}', config.teacher
    if teacher.weight_quantization == 'float' and teacher.vocab_size != config.model.vocab_size:
        raise InputError(
            f'{key}: the teacher has model.vocab_size={teacher.vocab_size}, but the student has '
            f'{config.model.vocab_size}; set model.vocab_size={teacher.vocab_size}, or choose a teacher with the same '
            'tokenizer'
        )
    return _resolved_frozen(config, teacher, f'{key}: the teacher', platform, capability)


def _resolved_scorer(config: Config, platform: str, capability: tuple[int, int] | None) -> ModelConfig | None:
    """Returns the reward model of a resolved config as a rollout computes it: in the dtype of the run.

    If its config was not read, it is assumed to have the size of the policy; see `with_frozen_models`.

    Raises:
        InputError: the reward model does not fit to the sequence length or the mesh of the run.
    """
    if not config.grpo.reward_model:
        return None
    model = config.scorer or dataclasses.replace(config.model, reward_head=True, lora_rank=0)
    name = f'grpo.reward_model={config.grpo.reward_model}: the reward model'
    return _resolved_frozen(config, model, name, platform, capability)


def _resolved_frozen(
    config: Config, model: ModelConfig, name: str, platform: str, capability: tuple[int, int] | None
) -> ModelConfig:
    """Returns the model of another checkpoint, which the run does not train, in the dtype of the run."""
    seq_len = config.data.seq_len
    model = dataclasses.replace(
        model,
        dtype=config.model.dtype,
        attention='auto',
        norm_kernel='xla',
        **NO_FP8,
        remat_policy='none',
        dropout=0.0,
        mtp_depth=0,
        value_head=False,
    )
    if model.weight_quantization != 'float':
        raise InputError(f'{name} is quantized; choose the checkpoint before quantization')
    if model.position_embedding == 'learned' and model.max_positions < seq_len:
        raise InputError(
            f'{name} has learned positions for {model.max_positions} tokens, but data.seq_len={seq_len}; '
            f'set data.seq_len={model.max_positions} or less'
        )
    alone = dataclasses.replace(config, model=model, teacher=None, scorer=None)
    model = dataclasses.replace(model, attention=attention_kernel(alone, platform, capability))
    with name_errors(name):
        check_layout(alone)
    return model


def resolve_on(
    config: Config,
    *,
    platform: str,
    num_devices: int,
    capability: tuple[int, int] | None = None,
    share_layers: bool = False,
) -> Config:
    """Returns the resolved config of a finished run adapted to the given devices, without gradient accumulation.

    By default, parameters are sharded over all devices; `share_layers` shards heads and feed-forward instead. The
    batch per device is `train.per_device_batch_size`, which fitted in training, or one sequence if the key is 0.
    FP8 matrix products are kept if the devices support them, so that the model computes as in training.
    `train.deterministic` is dropped, because it only concerns training.
    """
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, deterministic=False))
    mesh = MeshConfig(fsdp=1, tensor=num_devices) if share_layers else MeshConfig(fsdp=num_devices)
    model = dataclasses.replace(
        config.model, attention='auto', expert_matmul='auto', norm_kernel='xla', fp8_kernel='xla'
    )
    kernel = attention_kernel(dataclasses.replace(config, model=model, mesh=mesh), platform, capability)
    model = dataclasses.replace(model, attention=kernel, expert_matmul=expert_matmul('auto', platform, mesh))
    if not multiplies(model.matmul_precision, platform, capability):
        model = dataclasses.replace(model, **NO_FP8)
    micro_batch = max(1, config.train.per_device_batch_size)
    config = dataclasses.replace(
        config,
        model=model,
        mesh=mesh,
        train=dataclasses.replace(
            config.train, global_batch_size=micro_batch * mesh.fsdp, per_device_batch_size=micro_batch
        ),
    )
    check_layout(config)
    return config


def needs_tokamax(model: ModelConfig, platform: str) -> bool:
    """Returns True if attention or the products of experts use the package tokamax on this platform."""
    is_dropless = model.num_experts > 0 and not model.expert_capacity_factor
    of_experts = is_dropless and model.expert_matmul in ('auto', 'tokamax')
    return platform == 'gpu' and (of_experts or model.attention == 'tokamax')


def config_for_model(model: Mapping[str, Any], source: str) -> Config:
    """Returns the config of a workdir that contains a model without a run.

    The keys of `model.*` are resolved. All other keys have their defaults, except that `data.seq_len` is limited to
    `model.max_positions`. Training needs explicit values for the run length, the batch and the data.

    Raises:
        InputError: the model settings are inconsistent.
    """
    values = default()
    for key, value in model.items():
        values.model[key] = value
    values.data.seq_len = min(_WINDOW, model['max_positions'])
    values.train.update(num_steps=1, global_batch_size=1)
    if values.model.reward_head:
        values.train.objective = 'reward'
    with name_errors(source):
        config = build(values)
        resolved = resolve(config, platform='cpu', num_devices=1, vocab_size=model['vocab_size'], windows=1)
    return dataclasses.replace(config, model=resolved.model, train=TrainConfig(objective=config.train.objective))
