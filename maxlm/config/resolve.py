"""Resolves the keys that depend on the machine and on the dataset: mesh, batch, run length, vocabulary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from maxlm.config.loading import build, default
from maxlm.config.mesh import check_layout, check_stages, padded_vocabulary, resolve_mesh
from maxlm.config.schema import AUTO, UNDECIDED_STEPS, Config, MeshConfig, ModelConfig, TrainConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.config.sections.model import NO_FP8, AttentionKernel, ExpertMatmul
from maxlm.config.sections.quantization import QUANTIZATION_GROUPS
from maxlm.config.validation import divides
from maxlm.errors import InputError

# Minimum compute capability of GPUs with FP8 matrix products (Ada; Hopper has 9.0). The dimensions of these products
# must be multiples of FP8_MULTIPLE.
FP8_CAPABILITY, FP8_MULTIPLE = (8, 9), 16
# Splash attention needs sequence lengths that are multiples of the width of a TPU's vector unit.
SPLASH_MULTIPLE = 128
# Major compute capabilities of GPUs with a deterministic backward pass of cuDNN's attention: Hopper and Blackwell.
# TransformerEngine uses it on these too.
DETERMINISTIC_CUDNN = (9, 10)
# Width of the residual stream above which a thread of the norm kernels needs more registers than it has.
NORM_KERNEL_MAX_DIM = 8192
# Platform of each kernel for the products of experts.
_KERNELS = {'tokamax': 'gpu', 'megablox': 'tpu'}
# `data.seq_len` of a config that describes a model without a run.
_WINDOW = 1024
# Requirement of the fused attention kernels.
_NO_SINKS = 'model.attention_sinks=False; found True'


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
            expert_matmul=_expert_matmul(model.expert_matmul, platform, mesh),
        )
    model = dataclasses.replace(
        model,
        attention=_attention_kernel(dataclasses.replace(config, model=model, mesh=mesh), platform, capability),
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
    _check_matmul(config, platform, capability)
    _check_norm_kernel(config, platform)
    return dataclasses.replace(config, teacher=_resolved_teacher(config, platform, capability))


def _resolved_teacher(config: Config, platform: str, capability: tuple[int, int] | None) -> ModelConfig | None:
    """Returns the model of a resolved config's teacher as the step computes it: in the dtype of the run.

    Raises:
        InputError: the teacher does not fit to the vocabulary, the sequence length or the mesh of the run.
    """
    assert bool(config.distill.teacher) == (config.teacher is not None), 'see `maxlm.checkpoint.teacher.with_teacher`'
    if config.distill.logits_dir and not config.distill.top_k:
        raise InputError(
            f'distill.top_k=0 with distill.logits_dir={config.distill.logits_dir}: set it to the number of stored '
            'tokens for each position (--top-k of `maxlm distill`) or less'
        )
    if config.teacher is None:
        return None
    key, seq_len = f'distill.teacher={config.distill.teacher}', config.data.seq_len
    teacher = dataclasses.replace(
        config.teacher,
        dtype=config.model.dtype,
        attention='auto',
        norm_kernel='xla',
        **NO_FP8,
        remat_policy='none',
        dropout=0.0,
        mtp_depth=0,
    )
    if teacher.weight_quantization != 'float':
        raise InputError(f'{key}: the teacher is quantized; choose the checkpoint before quantization')
    if teacher.vocab_size != config.model.vocab_size:
        raise InputError(
            f'{key}: the teacher has model.vocab_size={teacher.vocab_size}, but the student has '
            f'{config.model.vocab_size}; set model.vocab_size={teacher.vocab_size}, or choose a teacher with the same '
            'tokenizer'
        )
    if teacher.position_embedding == 'learned' and teacher.max_positions < seq_len:
        raise InputError(
            f'{key}: the teacher has learned positions for {teacher.max_positions} tokens, but data.seq_len={seq_len}; '
            f'set data.seq_len={teacher.max_positions} or less'
        )
    alone = dataclasses.replace(config, model=teacher, teacher=None)
    teacher = dataclasses.replace(teacher, attention=_attention_kernel(alone, platform, capability))
    try:
        check_layout(alone)
    except InputError as error:
        raise InputError(f'{key}: {error}') from error
    return teacher


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
    model = dataclasses.replace(config.model, attention='auto', expert_matmul='auto', norm_kernel='xla')
    kernel = _attention_kernel(dataclasses.replace(config, model=model, mesh=mesh), platform, capability)
    model = dataclasses.replace(model, attention=kernel, expert_matmul=_expert_matmul('auto', platform, mesh))
    if not _multiplies_fp8(platform, capability):
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


def _multiplies_fp8(platform: str, capability: tuple[int, int] | None) -> bool:
    """Returns True for GPUs with FP8 products or unknown capability, and for CPUs, which emulate FP8 slowly."""
    return platform == 'cpu' or (platform == 'gpu' and (capability is None or capability >= FP8_CAPABILITY))


def _check_matmul(config: Config, platform: str, capability: tuple[int, int] | None) -> None:
    """Checks that devices and sizes support `model.matmul_precision=fp8` if a resolved config sets it."""
    model, parts = config.model, config.mesh.tensor
    if model.matmul_precision != 'fp8':
        return
    if not _multiplies_fp8(platform, capability):
        here = f'of kind {platform}' if capability is None else 'of compute capability {}.{}'.format(*capability)
        raise InputError(
            f'model.matmul_precision=fp8: the devices are {here}; FP8 requires GPUs with compute capability '
            f'{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or higher (Ada, Hopper); set model.matmul_precision=default'
        )
    sizes = {
        'model.dim': model.dim,
        'model.num_heads · model.head_dim': model.num_heads * model.head_dim // parts,
        'model.num_kv_heads · model.head_dim': model.num_kv_heads * model.head_dim // parts,
        'model.ffn_dim': model.ffn_dim // parts,
    }
    if model.fp8_head:
        sizes['model.vocab_size'] = padded_vocabulary(model.vocab_size, parts) // parts
    if model.kv_lora_rank:
        sizes['model.q_lora_rank'] = model.q_lora_rank
        sizes['model.kv_lora_rank'] = model.kv_lora_rank
        sizes['model.qk_rope_head_dim'] = model.qk_rope_head_dim
        sizes['model.num_heads · model.qk_nope_head_dim'] = model.num_heads * model.qk_nope_head_dim // parts
        sizes['model.num_heads · model.v_head_dim'] = model.num_heads * model.v_head_dim // parts
    for key, size in sizes.items():
        if size % FP8_MULTIPLE:
            below = size // FP8_MULTIPLE * FP8_MULTIPLE
            closest = f'{below} or {below + FP8_MULTIPLE}' if below else str(FP8_MULTIPLE)
            each = f' on each of mesh.tensor={parts} devices' if parts > 1 and key != 'model.dim' else ''
            raise InputError(
                f'model.matmul_precision=fp8: {key} is {size}{each} but must be a multiple of {FP8_MULTIPLE}; nearest: '
                f'{closest}'
            )


def _check_norm_kernel(config: Config, platform: str) -> None:
    """Checks that devices, mesh and width support `model.norm_kernel=pallas` if a resolved config sets it."""
    if config.model.norm_kernel == 'xla':
        return
    if platform != 'gpu':
        raise InputError(f'model.norm_kernel=pallas: not available on {platform} devices; set it to xla')
    for key, found, most in (
        # JAX has no batching rule for the sharded kernels.
        ('mesh.stage', config.mesh.stage, 1),
        ('model.dim', config.model.dim, NORM_KERNEL_MAX_DIM),
    ):
        if found > most:
            raise InputError(
                f'model.norm_kernel=pallas requires a {key} of at most {most}; found {found}; set it to xla'
            )


def needs_tokamax(model: ModelConfig, platform: str) -> bool:
    """Returns True if the products of experts use the package tokamax on this platform."""
    is_dropless = model.num_experts > 0 and not model.expert_capacity_factor
    return is_dropless and platform == 'gpu' and model.expert_matmul in ('auto', 'tokamax')


def _expert_matmul(requested: ExpertMatmul, platform: str, mesh: MeshConfig) -> ExpertMatmul:
    """Returns `model.expert_matmul` with auto resolved."""
    if requested == 'auto':
        # JAX's batching rule of kernels does not support the stages of a pipeline.
        of_platform: dict[str, ExpertMatmul] = {
            'gpu': 'tokamax',
            'tpu': 'ragged_dot' if mesh.stage > 1 else 'megablox',
        }
        return of_platform.get(platform, 'loop')
    if requested in _KERNELS and platform != _KERNELS[requested]:
        raise InputError(f'model.expert_matmul={requested}: not available on {platform} devices; set it to auto')
    if requested == 'megablox' and mesh.stage > 1:
        raise InputError(
            f'model.expert_matmul=megablox does not support mesh.stage={mesh.stage}; set it to auto, or mesh.stage=1'
        )
    return requested


def _attention_kernel(config: Config, platform: str, capability: tuple[int, int] | None) -> AttentionKernel:
    """Returns `model.attention` with auto resolved. The config must have a resolved mesh and head_dim."""
    requested = config.model.attention
    of_platform: dict[str, tuple[tuple[AttentionKernel, ...], str]] = {
        'gpu': (('cudnn', 'cudnn_mask'), _cudnn_needs(config, capability)),
        'tpu': (('splash',), _splash_needs(config)),
    }
    kernels, needs = of_platform.get(platform, (('xla',), ''))
    if requested == 'auto':
        # With a list of documents, the deterministic backward pass needs a multiple of the memory on Hopper
        # (NVIDIA/cudnn-frontend #398).
        return 'xla' if needs else kernels[-1 if config.train.deterministic else 0]
    if requested not in ('xla', *kernels):
        raise InputError(f'model.attention={requested}: not available on {platform} devices; set it to auto')
    if requested in kernels and needs:
        raise InputError(f'model.attention={requested} requires {needs}; set it to auto')
    return requested


def _cudnn_needs(config: Config, capability: tuple[int, int] | None) -> str:
    """Returns the unmet requirements of cuDNN attention for an error message, or '' if all are met."""
    model = config.model
    if config.train.deterministic and (capability is None or capability[0] not in DETERMINISTIC_CUDNN):
        found = 'an unknown one' if capability is None else '{}.{}'.format(*capability)
        return f'compute capability 9.x or 10.x with train.deterministic=true; found {found}'
    if model.attention_sinks:
        return _NO_SINKS
    # Limits of cuDNN on all supported GPUs.
    if model.attention_softcap:
        return f'model.attention_softcap=0; found {model.attention_softcap}'
    if model.dtype in ('bfloat16', 'float16') and model.head_dim % 8 == 0 and model.head_dim <= 128:
        return ''
    return (
        f'model.dtype=bfloat16 or float16, and a head_dim that is a multiple of 8, at most 128; found {model.dtype} '
        f'and {model.head_dim}'
    )


def _splash_needs(config: Config) -> str:
    """Returns the unmet requirements of splash attention for an error message, or '' if all are met."""
    mesh, seq_len = config.mesh, config.data.seq_len
    if config.model.attention_sinks:
        return _NO_SINKS
    if config.model.dtype == 'float16':
        return 'model.dtype=bfloat16 or float32; found float16'
    if mesh.context > 1 or mesh.stage > 1:
        return f'mesh.context=1 and mesh.stage=1; found {mesh.context} and {mesh.stage}'
    if seq_len % SPLASH_MULTIPLE:
        below = seq_len // SPLASH_MULTIPLE * SPLASH_MULTIPLE
        closest = f'{below} or {below + SPLASH_MULTIPLE}' if below else str(SPLASH_MULTIPLE)
        return f'a data.seq_len that is a multiple of {SPLASH_MULTIPLE}; found {seq_len}; nearest: {closest}'
    return ''


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
    try:
        config = build(values)
        resolved = resolve(config, platform='cpu', num_devices=1, vocab_size=model['vocab_size'], windows=1)
    except InputError as error:
        raise InputError(f'{source}: {error}') from error
    return dataclasses.replace(config, model=resolved.model, train=TrainConfig())
