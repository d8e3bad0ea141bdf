"""Log lines and event fields of a run, before its first step and after its last."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from maxlm.config.schema import UNDECIDED_STEPS, Config
from maxlm.config.user_function import is_function_name, module_checksum
from maxlm.data.compression.bytes_per_token import bytes_per_token
from maxlm.errors import InputError
from maxlm.formatting import format_duration, format_si, plural
from maxlm.hardware.chips import Peak
from maxlm.hardware.prices import Price
from maxlm.log import logger
from maxlm.model.parameters import count_active_parameters, count_parameters, parameters_text
from maxlm.planning.cost import DEFAULT_TERMS
from maxlm.planning.forecast import Forecast
from maxlm.planning.report import cost_of, startup_text
from maxlm.telemetry.cost import HOUR
from maxlm.telemetry.environment import checkout, command, devices, result_changes, versions
from maxlm.telemetry.events import read_events
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.metric_logger import MetricLogger
from maxlm.trainer.preflight import PreparedStep
from maxlm.trainer.throughput import Throughput

# Categories of the time of a run that generates rollouts, and their names in its last lines.
_ROLLOUT_USES = {
    'step': 'training',
    'rollout': 'generating',
    'reward_wait': 'waiting for rewards',
    'tool_wait': 'waiting for tools or environments',
}


def headline(config: Config) -> str:
    """Returns the number of parameters, the devices and the mesh in one line."""
    kind = jax.local_devices()[0].device_kind
    return f'{parameters_text(config.model)} on {jax.device_count()} × {kind} ({_mesh(config)})'


def describe_start(
    ready: PreparedStep, source: BatchSource, peak: Peak, price: Price | None, identities: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the fields of the event `started` as JSON values, which are known before the first step."""
    config, forecast = ready.config, ready.forecast
    target, train = forecast.target, config.train
    planned = math.isfinite(forecast.time.total)
    cost = cost_of(forecast, DEFAULT_TERMS) if planned else None
    of_all = target.num_devices * price.dollars if price else None
    return {
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'command': command('grpo' if train.objective == 'grpo' else 'train'),
        'versions': versions(),
        'git': checkout(),
        'devices': devices(),
        # One identity for each process.
        'identity': identities,
        'parameters': count_parameters(config.model),
        'active_parameters': count_active_parameters(config.model),
        'mesh': _mesh(config),
        'peak_tflops': peak.tflops or None,
        'peak_source': peak.source,
        'tokens_per_step': train.global_batch_size * config.data.seq_len,
        'num_steps': None if train.num_steps == UNDECIDED_STEPS else train.num_steps,
        'price_per_hour': price.dollars if price else None,
        'price_source': price.source if price else None,
        'plan': {
            'step_seconds': forecast.time.total if planned else None,
            'tokens_per_second': forecast.tokens_per_second if planned else None,
            'memory_bytes': forecast.needed,
            'memory_available_bytes': forecast.available,
            'hours': cost.hours if cost else None,
            'dollars': cost.hours * of_all if cost and of_all is not None else None,
        },
        'dataset': {**source.fingerprint(config), 'sources': source.source_descriptions()},
        'baseline': source.baseline(config),
        'bytes_per_token': bytes_per_token(source.tokenizer),
        'functions': _functions(config),
    }


def _functions(config: Config) -> dict[str, str]:
    """Returns the SHA-256 of the module of each function of the user that computes the step, by name."""
    names = (config.model.block, config.train.loss, config.optimizer.name, config.optimizer.schedule)
    return {name: module_checksum(name) for name in names if is_function_name(name)}


def warn_of_changes(workdir: Path, start_fields: Mapping[str, Any], *, deterministic: bool) -> None:
    """Logs a warning if functions of the user have changed, or if others computed a deterministic run until now.

    Args:
        workdir: directory of the run. An unreadable event log is ignored.
        start_fields: result of `describe_start`.
        deterministic: `train.deterministic`: also compare versions and devices.
    """
    try:
        starts = [event for event in read_events(workdir).lines if event.get('kind') == 'started']
    except (InputError, OSError):
        return
    if not starts:
        return
    before = starts[-1].get('functions')
    for name, checksum in start_fields['functions'].items():
        if isinstance(before, dict) and before.get(name, checksum) != checksum:
            logger.warning(f'{name}: the file of its module has changed since the last start')
    if deterministic and (changes := result_changes(starts[-1], start_fields)):
        logger.warning(
            f'train.deterministic: {", ".join(changes)} since the last start, so the next losses are not bit for bit '
            'those of a run without interruption; start with the earlier versions and devices if they must be'
        )


def log_start(config: Config, forecast: Forecast, *, peak: Peak, price: Price | None) -> None:
    """Logs the model, devices, batch, plan and price before the first step.

    `peak` is the peak FLOP/s for MFU, and `price` the price of one device per hour, if known.
    """
    logger.info(
        f'{headline(config)}; '
        f'step of {config.train.global_batch_size} × {config.data.seq_len} tokens in '
        f'{plural(config.accumulation, "micro-batch")} of {config.train.per_device_batch_size} per device; '
        f'attention kernel {config.model.attention}'
        f'{"; train.deterministic=true" if config.train.deterministic else ""}'
    )
    for line in startup_text(forecast):
        logger.info(line)
    if jax.default_backend() == 'cpu' and config.model.dtype != 'float32':
        logger.warning(
            f'model.dtype={config.model.dtype}: XLA emulates it on a CPU, so steps are slower; set '
            '--config.model.dtype=float32, which changes neither parameters nor checkpoints'
        )
    if 0 < config.train.num_steps <= config.optimizer.warmup_steps:
        logger.warning(
            f'optimizer.warmup_steps={config.optimizer.warmup_steps} is not below '
            f'train.num_steps={config.train.num_steps}: the peak learning rate is never reached; shorten the warmup'
        )
    logger.info(f'MFU is relative to a peak of {peak.tflops:,.3g} TFLOP/s per device ({peak.source})')
    if price:
        logger.info(
            f'price: ${price.dollars:g} per device-hour ({price.source}), '
            f'${price.dollars * jax.device_count():,.2f} per hour for all devices'
        )


def log_end(
    step: int,
    why: str,
    *,
    source: BatchSource,
    metric_logger: MetricLogger,
    throughput: Throughput,
    spent: dict[str, float],
    by_category: Mapping[str, float],
    seconds: float,
) -> None:
    """Logs the results of a finished run.

    Args:
        step: number of the last step.
        why: reason why the run is finished.
        source, metric_logger, throughput: components of the run.
        spent: result of `RunRecorder.metrics`.
        by_category: seconds of this process by category, see `Timeline.read`.
        seconds: duration of this process.
    """
    logger.info(f'run finished: {why}')
    perf = throughput.read_total()
    mfu = (
        f', MFU {perf["perf/mfu"]:.1%} counting causal attention ({perf["perf/mfu_full"]:.1%} counting full attention)'
        if 'perf/mfu' in perf
        else ''
    )
    tokens, epochs = metric_logger.trained(step)
    data_tokens = sum(description['tokens'] or 0 for description in source.source_descriptions())
    of_data = (
        '' if epochs is None else f' ({epochs:.3g} epochs; the training data have {format_si(data_tokens)} tokens)'
    )
    logger.info(
        f'done: {step} steps in {format_duration(seconds)}, {format_si(tokens)} tokens{of_data}, '
        f'{perf["perf/tokens_per_second"]:,.0f} tokens/s{mfu}'
    )
    if by_category['rollout']:
        total = sum(by_category[category] for category in _ROLLOUT_USES)
        parts = [f'{use} {by_category[category] / total:.0%}' for category, use in _ROLLOUT_USES.items()]
        logger.info(f'time of steps and rollouts: {", ".join(parts)}')
    dollars = f', ${spent["cost/dollars"]:,.2f}' if 'cost/dollars' in spent else ''
    logger.info(
        f'all attempts of the run: {format_duration(spent["cost/hours"] * HOUR)}{dollars}; goodput '
        f'{spent["goodput/fraction"]:.1%} of the time since the first start'
    )
    validation = metric_logger.validation_loss
    validation_text = '' if validation is None else f'; validation loss {validation:.3f}'
    logger.info(f'training loss {metric_logger.last_loss:.3f}{validation_text}{source.at_end()}')


def _mesh(config: Config) -> str:
    return ' '.join(f'{axis}={size}' for axis, size in config.mesh.sizes.items() if size > 1) or 'one device'
