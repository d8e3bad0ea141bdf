"""Creates the services of a run and the components of its training loop."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import Any, NamedTuple

import jax

from maxlm.checkpoint.manager import Checkpoints
from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.evaluation.tasks.periodic import Tasks, open_tasks
from maxlm.hardware.chips import Peak, find_peak
from maxlm.hardware.identity import identify, summary
from maxlm.log import logger, progress_bar
from maxlm.runtime.barrier import ProcessGroup
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.runtime.notices.watcher import MaintenanceWatcher
from maxlm.runtime.preemption import StopRequest
from maxlm.runtime.watchdog import Watchdog
from maxlm.storage.json_text import parse_json
from maxlm.telemetry.alerts import PerformanceAlerts
from maxlm.telemetry.trackers import Trackers
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.budget import RunBudget
from maxlm.trainer.metric_logger import MetricLogger
from maxlm.trainer.preflight import PreparedStep
from maxlm.trainer.replay import Replays
from maxlm.trainer.run_context import RunContext
from maxlm.trainer.step_runner import DataWait, StepRunner
from maxlm.trainer.summary import describe_start, headline, log_start, warn_of_changes
from maxlm.trainer.throughput import Throughput
from maxlm.training.decisions.run_control import RunControl, apply_control
from maxlm.training.flops import step_flops
from maxlm.training.state import ignores_schedule


class Services(NamedTuple):
    """Services that run from the start of the training process to its end.

    Attributes:
        watchdog: stops the process if a step hangs.
        stop_request: stop request by SIGTERM or a maintenance event.
        checkpoint_manager: saves and restores the checkpoints of the workdir.
        data_wait: measures how long steps wait for data.
        peak: peak FLOP/s for MFU.
    """

    watchdog: Watchdog
    stop_request: StopRequest
    checkpoint_manager: Checkpoints
    data_wait: DataWait
    peak: Peak


class LoopComponents(NamedTuple):
    """Objects that the training loop calls."""

    tasks: Tasks | None
    trackers: Trackers
    throughput: Throughput
    metric_logger: MetricLogger
    runner: StepRunner
    budget: RunBudget


def open_services(
    stack: contextlib.ExitStack,
    prepared: PreparedStep,
    source: BatchSource,
    context: RunContext,
    heartbeats: Heartbeats,
) -> Services:
    """Records the start of the run, and opens its services in `stack`."""
    config, recorder = prepared.config, context.recorder
    peak = find_peak(config.metrics.peak_tflops, config.model.dtype)
    start_fields = describe_start(prepared, source, peak, recorder.price, gather_identities())
    if jax.process_index() == 0:
        warn_of_changes(context.workdir, start_fields, deterministic=config.train.deterministic)
    recorder.record_event('started', headline(config), **start_fields)
    if compiled := prepared.forecast.compiled:
        recorder.record_event('compiled', f'the training step in {compiled.seconds:.1f} s', seconds=compiled.seconds)
    workdir = context.workdir if jax.process_index() == 0 else None
    watchdog = stack.enter_context(Watchdog(config.train.hang_timeout_seconds, heartbeats, workdir))
    stop_request = stack.enter_context(StopRequest())
    stack.enter_context(
        MaintenanceWatcher(
            stop_request.request,
            warn=partial(context.alerts.send, 'machine'),
            run=f'{context.workdir.absolute()} {jax.process_index()}',
        )
    )
    # Closing the stack completes pending saves, also after an error.
    checkpoint_manager = stack.enter_context(
        Checkpoints(
            context.checkpoint_workdir,
            max_to_keep=config.checkpoint.max_to_keep,
            keep_best=config.checkpoint.keep_best,
            keep_period=config.checkpoint.keep_period,
            max_bytes=config.checkpoint.max_bytes,
            compare_replicas=config.checkpoint.compare_replicas,
            on_failure=partial(context.alerts.send, 'checkpoint'),
        )
    )
    data_wait = stack.enter_context(DataWait(recorder.timeline))
    return Services(watchdog, stop_request, checkpoint_manager, data_wait, peak)


def gather_identities() -> list[dict[str, Any]]:
    """Returns the identities of the accelerators of each process, and logs them. All processes call it together."""
    if jax.default_backend() == 'cpu':
        return []
    identities = [parse_json(text) for text in ProcessGroup().gather(json.dumps(identify()))]
    for process, identity in enumerate(identities):
        logger.info(f'devices of process {process}: {summary(identity)}')
    return identities


def make_loop_components(
    stack: contextlib.ExitStack,
    prepared: PreparedStep,
    source: BatchSource,
    context: RunContext,
    services: Services,
    *,
    start: int,
    decisions: RunControl,
) -> LoopComponents:
    """Creates the components of the loop, and logs the model, devices, batch, plan and price of the run.

    Args:
        stack: closes the progress bar and the trackers.
        prepared: the compiled step.
        source: the open batch source.
        context: context of the run.
        services: services of the run.
        start: number of the last completed step.
        decisions: decisions of the run so far.
    """
    config, recorder = apply_control(prepared.config, decisions), context.recorder
    tasks = open_tasks(config, prepared.layout, source.tokenizer_path)
    throughput = Throughput(
        tokens_per_step=config.train.global_batch_size * config.data.seq_len,
        flops=step_flops(config, config.context_at(start)),
        peak=services.peak,
        num_devices=jax.device_count(),
    )
    alerts = PerformanceAlerts(
        config.alerts,
        context.alerts.send,
        # The first step connects the processes.
        is_training=lambda: throughput.steps > 0 and recorder.timeline.is_training,
    )
    trackers = Trackers(stack, config, workdir=context.workdir, attempt=recorder.attempt, on_reading=alerts.on_reading)
    if config.optimizer.is_function and ignores_schedule(config, prepared.layout):
        logger.warning(
            f'optimizer.name={config.optimizer.name}: its updates do not use the argument learning_rate, so '
            'optimizer.schedule and guard.rollback_lr_factor have no effect, and train/learning_rate is not its rate'
        )
    log_start(config, prepared.forecast, peak=services.peak, price=recorder.price)
    show_bar = config.metrics.progress_bar and jax.process_index() == 0
    # Without a terminal, the log lines show the progress.
    bar = stack.enter_context(
        progress_bar('train', total=config.train.num_steps, initial=start, unit='step', show=show_bar, lines=False)
    )
    metric_logger = MetricLogger(
        config,
        throughput=throughput,
        bar=bar,
        windows_per_epoch=source.windows_per_epoch,
        sources=source.sources(config, decisions),
        batch_sizes=decisions.batch_sizes,
        warn=partial(context.alerts.send, 'skipped'),
        costs=recorder.metrics,
        devices=trackers.readings.metrics,
        # The values are those of the entire run, so one process reports them.
        on_log_line=(lambda metrics: None) if jax.process_index() else alerts.on_log_line,
    )
    if config.train.num_steps != UNDECIDED_STEPS:
        metric_logger.log_sources(config.train.num_steps)
    runner = StepRunner(
        prepared,
        source,
        data_wait=services.data_wait,
        recorder=recorder,
        watchdog=services.watchdog,
        profile=trackers.profile,
        metric_logger=metric_logger,
        throughput=throughput,
        replays=Replays(
            config,
            prepared.layout,
            metric_logger=metric_logger,
            recorder=recorder,
            throughput=throughput,
            saved_steps=services.checkpoint_manager.steps,
        ),
    )
    # Attempts that were killed after their last save also cost time.
    unrecorded = max(0.0, recorder.previous_seconds - 3600 * decisions.hours)
    budget = RunBudget(
        prepared.config,
        began=recorder.timeline.origin - unrecorded,
        throughput=throughput,
        num_devices=jax.device_count(),
        evaluation_fraction=source.evaluation_fraction,
        save_seconds=lambda: services.checkpoint_manager.save_seconds,
    )

    return LoopComponents(tasks, trackers, throughput, metric_logger, runner, budget)
