"""Fills in the keys that depend on the machine and on the data set: mesh, batch, length, vocabulary."""

from __future__ import annotations

import dataclasses

from maxlm.config.keys import AUTO, UNDECIDED_STEPS, Config, MeshConfig, ModelConfig
from maxlm.config.layouts import check_layout, resolve_mesh
from maxlm.config.rules import divides
from maxlm.errors import InputError


def resolve(config: Config, *, platform: str, num_devices: int, vocab_size: int, windows: int) -> Config:
    """Fills in what depends on the machine and on the data set; afterwards no key means "derived".

    Args:
        config: as `build` returned it; train.micro_batch is a number (`maxlm.planning.fit` finds one for auto).
        platform: of the devices: cpu, gpu or tpu.
        num_devices: devices in the whole run.
        vocab_size: token ids of the data set.
        windows: training windows in one epoch of the data set.

    Raises:
        InputError: the numbers do not fit together; the message says which would.
    """
    mesh = resolve_mesh(config.mesh, num_devices)
    window = config.data.window
    train = config.train
    global_batch = train.global_batch or train.global_batch_tokens // window
    shards = mesh.replica * mesh.data * mesh.fsdp
    if global_batch % shards:
        raise InputError(
            f'train.global_batch={global_batch} cannot be split over {shards} devices (mesh replica·data·fsdp); '
            f'nearest: {max(1, round(global_batch / shards)) * shards}'
        )
    assert train.micro_batch != AUTO, 'a size for train.micro_batch=auto comes from planning'
    micro_batch = train.micro_batch or global_batch // shards
    if (global_batch // shards) % micro_batch:
        divides('train.micro_batch', micro_batch, 'the sequences per device', global_batch // shards)

    tokens_per_step = global_batch * window
    if train.num_steps:
        num_steps = train.num_steps
    elif train.hours or train.dollars:
        num_steps = UNDECIDED_STEPS
    elif train.num_tokens:
        num_steps = -(-train.num_tokens // tokens_per_step)
    else:
        num_steps = max(1, round(train.num_epochs * windows / global_batch))

    model = config.model
    if model.vocab_size and model.vocab_size < vocab_size:
        raise InputError(
            f'model.vocab_size={model.vocab_size} is below the {vocab_size} token ids of the data set '
            f'{config.data.path}; set it to {vocab_size} or more, or to 0'
        )
    swiglu_dim = -(-model.dim * 8 // 3 // 128) * 128
    model = dataclasses.replace(
        model,
        vocab_size=model.vocab_size or vocab_size,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=model.head_dim or model.dim // model.num_heads,
        ffn_dim=model.ffn_dim or (swiglu_dim if model.activation == 'swiglu' else 4 * model.dim),
        max_positions=model.max_positions or window,
    )
    model = dataclasses.replace(
        model,
        attention=_attention_kernel(model, platform),
        rotary_original_positions=model.rotary_original_positions or round(model.max_positions / model.rotary_factor),
    )
    optimizer = config.optimizer
    warmup_steps = optimizer.warmup_steps or -(-optimizer.warmup_tokens // tokens_per_step)
    config = dataclasses.replace(
        config,
        model=model,
        mesh=mesh,
        train=dataclasses.replace(train, num_steps=num_steps, global_batch=global_batch, micro_batch=micro_batch),
        optimizer=dataclasses.replace(optimizer, warmup_steps=warmup_steps),
    )
    check_layout(config)
    return config


def resolve_on(config: Config, *, platform: str, num_devices: int) -> Config:
    """A resolved config of a finished run for the devices that are here, without gradient accumulation.

    Parameters are sharded over all of them; the batch is `train.micro_batch` per device, as it fitted in training, or
    one sequence where there was none.
    """
    model = dataclasses.replace(config.model, attention='auto')
    model = dataclasses.replace(model, attention=_attention_kernel(model, platform))
    micro_batch = max(1, config.train.micro_batch)
    return dataclasses.replace(
        config,
        model=model,
        mesh=MeshConfig(fsdp=num_devices),
        train=dataclasses.replace(config.train, global_batch=micro_batch * num_devices, micro_batch=micro_batch),
    )


def _attention_kernel(model: ModelConfig, platform: str) -> str:
    """`model.attention` with auto decided. Takes a model whose head_dim is resolved."""
    # Limits of cuDNN's fused attention on all supported GPUs.
    fits = model.dtype in ('bfloat16', 'float16') and model.head_dim % 8 == 0 and model.head_dim <= 128
    if model.attention == 'auto':
        return 'cudnn' if platform == 'gpu' and fits else 'xla'
    if model.attention == 'cudnn' and platform != 'gpu':
        raise InputError(f'model.attention=cudnn: the devices here are of kind {platform}; set it to auto')
    if model.attention == 'cudnn' and not fits:
        raise InputError(
            f'model.attention=cudnn: needs model.dtype=bfloat16 or float16, and a head_dim that is a multiple of 8, at '
            f'most 128; here they are {model.dtype} and {model.head_dim}; set it to auto'
        )
    return model.attention
