"""Validates config values, alone and in combination. Errors name the key, the value and the values that work."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from maxlm.config.keys import check_values, declared_keys
from maxlm.config.schema import SECTIONS, Config, DataConfig
from maxlm.config.sections.ranges import Range
from maxlm.config.validation_architecture import check_architecture, check_experts, check_mtp
from maxlm.config.validation_optimizer import check_optimizer_keys, check_transfer
from maxlm.config.validation_rl import check_adapters, check_distill, check_dpo, check_reward, check_trained
from maxlm.errors import InputError

# Exactly one key of each group must be set.
EXCLUSIVE = (
    # Budgets come first: on another machine, the same budget gives another number of steps.
    ('train.hours', 'train.dollars', 'train.num_steps', 'train.num_tokens', 'train.num_epochs'),
    ('train.global_batch_size', 'train.global_batch_size_tokens'),
)

SOURCE_WEIGHT = Range(0, 1e9, above=True)
# With data.sources_schedule, a source may be absent from a stage.
STAGE_WEIGHT = Range(0, 1e9)

# Without a scan over layers, a step of 200 blocks already compiles for minutes.
MAX_UNROLLED_LAYERS = 200

# With fewer steps, the median and the deviation are too uncertain.
MIN_SPIKE_WINDOW = 16


def _value(config: Config, key: str) -> Any:
    return declared_keys()[key].of(config)


def check_paths(config: Config) -> Config:
    """Returns the config with `~` expanded in paths, and `file://` removed from keys that accept no other URLs.

    Raises:
        InputError: a path or URL is invalid regardless of the other keys. The message names the key.
    """
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key in declared_keys().values():
        if key.path is not None:
            sections[key.section][key.name] = key.checked_path(key.of(config))
    changed = {section: dataclasses.replace(getattr(config, section), **values) for section, values in sections.items()}
    return dataclasses.replace(config, **changed)


def validate(config: Config) -> None:
    check_values(config)
    model, data, train, optimizer = config.model, config.data, config.train, config.optimizer
    for group in EXCLUSIVE:
        _exactly_one(config, *group)
    check_optimizer_keys(optimizer)
    if not model.scan_layers and model.num_layers > MAX_UNROLLED_LAYERS:
        raise InputError(
            f'model.num_layers={model.num_layers} with model.scan_layers=False: compiling more than '
            f'{MAX_UNROLLED_LAYERS} unrolled blocks takes too long; set model.scan_layers=True'
        )
    if not model.head_dim and not model.kv_lora_rank:
        divides('model.num_heads', model.num_heads, 'model.dim', model.dim)
    if model.num_kv_heads:
        divides('model.num_kv_heads', model.num_kv_heads, 'model.num_heads', model.num_heads)
    if model.matmul_precision != 'default' and model.dtype == 'float16':
        raise InputError(
            f'model.matmul_precision={model.matmul_precision} with model.dtype=float16: results would exceed the range '
            'of float16; set model.dtype=bfloat16'
        )
    _check_fp8(config)
    check_architecture(model)
    check_transfer(model, optimizer)
    check_adapters(model)
    check_experts(config)
    _check_alerts(config)
    _check_reports(config)
    _check_sources(data)
    _check_sources_schedule(data)
    _check_context_schedule(data)
    check_dpo(config)
    check_reward(config)
    _check_loss(config)
    check_trained(config)
    check_mtp(config)
    check_distill(config)
    _check_guard(config)
    if model.position_embedding == 'learned' and model.max_positions and model.max_positions < data.seq_len:
        raise InputError(
            f'model.max_positions={model.max_positions} is below data.seq_len={data.seq_len}: learned positions must '
            f'cover the sequence length; set it to {data.seq_len} or more'
        )
    if train.global_batch_size_tokens % data.seq_len:
        below = train.global_batch_size_tokens // data.seq_len * data.seq_len
        raise InputError(
            f'train.global_batch_size_tokens={train.global_batch_size_tokens} is not a multiple of '
            f'data.seq_len={data.seq_len}; '
            f'nearest: {below or data.seq_len} or {below + data.seq_len}'
        )
    filled = [axis for axis, size in config.mesh.sizes.items() if size == -1]
    empty = [axis for axis, size in config.mesh.sizes.items() if size == 0]
    if len(filled) > 1:
        raise InputError(
            f'mesh.{filled[0]} and mesh.{filled[1]} are both -1; only one axis can be inferred from the number of '
            'devices'
        )
    if empty:
        raise InputError(f'mesh.{empty[0]}=0: must be at least 1, or -1 to use the remaining devices')


def _check_sources(data: DataConfig) -> None:
    sources, weights = data.sources, STAGE_WEIGHT if data.sources_schedule else SOURCE_WEIGHT
    example = "use (('DIR', weight), …), e.g. (('data/web', 0.7), ('data/code', 0.3))"
    for entry in sources:
        if not isinstance(entry, tuple) or [type(part) for part in entry] not in ([str, float], [str, int]):
            raise InputError(f'data.sources: {entry!r} is not a pair of a directory and a weight; {example}')
        path, weight = entry
        if not path or weight not in weights:
            raise InputError(
                f'data.sources: {entry!r}: the directory must not be empty, and the weight must be {weights}; {example}'
            )
    if sources and not any(weight for _, weight in sources):
        raise InputError(f'data.sources: all weights are 0; {example}')
    repeated = [path for path, count in Counter(path for path, _ in sources).items() if count > 1]
    if repeated:
        raise InputError(f'data.sources: {repeated[0]} is listed twice; list it once, with the sum of the weights')


def _check_alerts(config: Config) -> None:
    for key, value in (
        ('min_utilization', config.alerts.min_utilization),
        ('max_host_memory', config.alerts.max_host_memory),
    ):
        if value and not config.metrics.device_stats_interval_seconds:
            raise InputError(
                f'alerts.{key}={value:g} needs samples of the machine, but metrics.device_stats_interval_seconds=0; '
                f'set it to 30, or set alerts.{key}=0'
            )
    variable = config.alerts.webhook_env_var
    # The value is not shown because it may be the secret itself.
    if variable and not variable.isidentifier():
        raise InputError(
            'alerts.webhook_env_var: the value is not a valid variable name; set the name of an environment variable '
            'that contains the URL, e.g. ALERTS_URL (a URL would be visible in config.json)'
        )


def _check_reports(config: Config) -> None:
    for prompt in config.eval.sample_prompts:
        if not isinstance(prompt, str) or not prompt:
            raise InputError(
                f"eval.sample_prompts: {prompt!r} is not a non-empty string; use ('TEXT', …), e.g. "
                "('Once upon a time',)"
            )
    for task in config.eval.tasks:
        if not isinstance(task, str) or not task:
            raise InputError(
                f"eval.tasks: {task!r} is not a task name; use ('NAME', …), e.g. ('arc_easy', 'tasks/mine.yaml')"
            )
    if bool(config.eval.tasks) != bool(config.eval.tasks_interval):
        raise InputError(
            f'eval.tasks={config.eval.tasks} with eval.tasks_interval={config.eval.tasks_interval}: set both or neither'
        )
    if config.metrics.wandb and not config.metrics.wandb_project:
        raise InputError("metrics.wandb_project='' with metrics.wandb: set the name of the project, e.g. maxlm")


def _check_context_schedule(data: DataConfig) -> None:
    example = 'use ((length in tokens, fraction of the steps at which it ends), …), e.g. ((1024, 0.5), (2048, 0.8))'
    for entry in data.seq_len_schedule:
        if not isinstance(entry, tuple) or [type(part) for part in entry] not in ([int, float], [int, int]):
            raise InputError(f'data.seq_len_schedule: {entry!r} is not a pair of a length and a fraction; {example}')
        length, _ = entry
        if not 2 <= length < data.seq_len or data.seq_len % length:
            raise InputError(
                f'data.seq_len_schedule: {length} does not divide data.seq_len={data.seq_len} into 2 or more '
                f'sequences; use a smaller divisor of {data.seq_len}'
            )
    _check_fractions('data.seq_len_schedule', data.seq_len_schedule)
    if data.seq_len_schedule and data.rows != 'stream':
        raise InputError(
            f'data.seq_len_schedule={data.seq_len_schedule} with data.rows={data.rows}: the parts of a split row would '
            'begin within documents; set data.seq_len_schedule=() or data.rows=stream'
        )


def _check_sources_schedule(data: DataConfig) -> None:
    example = 'use (((weight, …), fraction of the steps at which it ends), …), e.g. (((0.7, 0.3), 0.8),)'
    for entry in data.sources_schedule:
        if not isinstance(entry, tuple) or [type(part) for part in entry] not in ([tuple, float], [tuple, int]):
            raise InputError(f'data.sources_schedule: {entry!r} is not a pair of weights and a fraction; {example}')
        weights, _ = entry
        if len(weights) != len(data.sources):
            raise InputError(
                f'data.sources_schedule: {entry!r} has {len(weights)} weights for {len(data.sources)} entries of '
                'data.sources; give one weight per entry'
            )
        valid = all(type(weight) in (int, float) and weight in STAGE_WEIGHT for weight in weights)
        if not valid or not any(weights):
            raise InputError(
                f'data.sources_schedule: {entry!r}: each weight must be {STAGE_WEIGHT}, and one must be above 0; '
                f'{example}'
            )
    _check_fractions('data.sources_schedule', data.sources_schedule)


def _check_fractions(key: str, schedule: tuple[tuple[Any, float], ...]) -> None:
    last_fraction = 0.0
    for entry in schedule:
        if not last_fraction < entry[1] < 1:
            raise InputError(f'{key}: {entry!r}: the fractions must increase and lie between 0 and 1 (both excluded)')
        last_fraction = entry[1]


def _check_loss(config: Config) -> None:
    train = config.train
    if train.loss and train.objective != 'next_token':
        raise InputError(
            f'train.loss={train.loss} with train.objective={train.objective}: only next_token has a loss of your own; '
            "set train.loss=''"
        )
    if train.loss and train.z_loss:
        raise InputError(
            f'train.loss={train.loss} with train.z_loss={train.z_loss}: set train.z_loss=0, and add the z-loss to your '
            'function'
        )


def _check_guard(config: Config) -> None:
    guard, train = config.guard, config.train
    if 0 < guard.spike_window < MIN_SPIKE_WINDOW:
        raise InputError(
            f'guard.spike_window={guard.spike_window}: too few steps to detect spikes; set it to at least '
            f'{MIN_SPIKE_WINDOW}, or to 0 to disable spike detection'
        )
    if guard.early_stopping_patience and not config.eval.interval:
        raise InputError(
            f'guard.early_stopping_patience={guard.early_stopping_patience} requires evaluations; set eval.interval'
        )
    for key in ('train.dollars', 'guard.max_dollars'):
        if _value(config, key) and not train.price_per_hour:
            raise InputError(f'{key}={_value(config, key)} requires a price; set train.price_per_hour')
    for key in ('train.hours', 'train.dollars'):
        if _value(config, key) and config.data.seq_len_schedule:
            raise InputError(
                f'{key}={_value(config, key)} with data.seq_len_schedule: steps of different sequence lengths take '
                'different times; set train.num_steps or train.num_tokens, optionally with '
                f'guard.max_{key.removeprefix("train.")}'
            )
        if _value(config, key) and config.data.sources_schedule:
            raise InputError(
                f'{key}={_value(config, key)} with data.sources_schedule: the steps at which the weights change must '
                'be known at the start; set train.num_steps or train.num_tokens'
            )


def _exactly_one(config: Config, *keys: str) -> None:
    present = [key for key in keys if _value(config, key)]
    if len(present) != 1:
        found = ' and '.join(f'{key}={_value(config, key)}' for key in present) if present else 'none'
        raise InputError(f'exactly one of {", ".join(keys)} must be set; found: {found}')


def divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        nearest = min(divisors(large), key=lambda n: (abs(n - small), -n))
        raise InputError(f'{small_key}={small} does not divide {large_key}={large}; nearest that does: {nearest}')


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def _check_fp8(config: Config) -> None:
    """Checks that the run supports delayed scaling, and the head in FP8."""
    model, mesh = config.model, config.mesh
    if model.fp8_head:
        remedy = 'set model.fp8_head=false'
        if model.matmul_precision != 'fp8':
            raise InputError(
                f'model.fp8_head=True with model.matmul_precision={model.matmul_precision}: the head alone is not '
                f'supported in FP8; set model.matmul_precision=fp8, or {remedy}'
            )
        if config.train.objective != 'next_token':
            raise InputError(f'model.fp8_head=True does not support train.objective={config.train.objective}; {remedy}')
        if config.train.loss or config.distill.teacher or config.distill.logits_dir:
            # The gradients of other losses are not bounded.
            raise InputError(f'model.fp8_head=True supports only the cross-entropy as the loss; {remedy}')
    if model.fp8_scaling == 'current':
        return
    key, remedy = 'model.fp8_scaling=delayed', 'set model.fp8_scaling=current'
    if model.matmul_precision != 'fp8':
        raise InputError(f'{key} with model.matmul_precision={model.matmul_precision}: no product is in FP8; {remedy}')
    if config.train.objective != 'next_token':
        # A reference model has no history, so both models would round differently.
        raise InputError(f'{key} does not support train.objective={config.train.objective}; {remedy}')
    if mesh.stage > 1:
        raise InputError(f'{key} does not support pipelines, mesh.stage={mesh.stage}; {remedy}')
    if mesh.host_offload == 'all':
        raise InputError(f'{key} does not support mesh.host_offload=all; set mesh.host_offload=optimizer, or {remedy}')
