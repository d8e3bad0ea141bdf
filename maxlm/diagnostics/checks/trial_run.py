"""Check `trial`: runs two steps of the training in a subprocess with a temporary workdir."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.config.schema import SECTIONS
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.jax_subprocess import exit_reason, with_package
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, skipped, warning
from maxlm.formatting import GIB, format_bytes

TRIAL_SECONDS = 1200.0
STEPS = 2
POLL_SECONDS = 0.2
# Minimum ratios of measured to planned step time and memory for a warning, and minimum fraction of a step spent waiting
# for data.
SLOWER, LARGER, WAITING = 1.5, 1.1, 0.2
RATE = 'perf/tokens_per_second'
# Settings that disable uploads, alerts, checkpoints, trackers and periodic work.
QUIET = {
    'train.log_every': 1,
    'eval.interval': 0,
    'eval.num_samples': 0,
    'checkpoint.save_interval_steps': 0,
    'checkpoint.save_interval_minutes': 0,
    'checkpoint.keep_period': 0,
    'checkpoint.remote_dir': '',
    'export.to': '',
    'alerts.file': '',
    'alerts.command': '',
    'alerts.webhook_env_var': '',
    'metrics.tensorboard': 'false',
    'metrics.wandb': '',
    'metrics.progress_bar': 'false',
    'profile.start_step': 0,
}


class Trial(NamedTuple):
    """Result of a trial run.

    Attributes:
        trouble: reason why two steps were not completed, in one line; '': they were.
        lines: lines of metrics.jsonl.
        plan: the run's own forecast in the `started` event of events.jsonl; {}: none.
        seconds: time until the second step was completed.
        events: lines of events.jsonl.
    """

    trouble: str
    lines: Sequence[dict[str, Any]]
    plan: dict[str, Any]
    seconds: float
    events: Sequence[dict[str, Any]] = ()

    @property
    def tokens_per_second(self) -> float:
        """Returns the throughput of the last step; NaN if it is unknown."""
        return next((line[RATE] for line in reversed(self.lines) if line.get(RATE)), math.nan)


def check_trial(context: CheckContext) -> CheckResult:
    """Trains two steps."""
    if context.config is None:
        return skipped('no --config to run')
    if context.num_processes > 1:
        return skipped('the run has several processes; run it on one machine, without their variables')
    with tempfile.TemporaryDirectory(prefix='maxlm-doctor-', ignore_cleanup_errors=True) as directory:
        workdir = Path(directory) / 'run'
        trial = try_run(trial_command(context, workdir), context.environment, workdir, is_done=reached(STEPS))
        return evaluate_trial(trial, min_tokens_per_second=context.min_tokens_per_second)


def trial_command(context: CheckContext, workdir: Path, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Returns the command of the run. The settings of QUIET and `settings` come last and take precedence."""
    # Only include existing keys.
    quiet = {key: value for key, value in {**QUIET, **(settings or {})}.items() if _exists(key)}
    return [
        sys.executable,
        '-m',
        'maxlm.train',
        f'--config={context.spec}',
        f'--workdir={workdir}',
        *(f'--config.{override}' for override in context.overrides),
        *(f'--config.{key}={value}' for key, value in quiet.items()),
    ]


def reached(step: int) -> Callable[[Path], bool]:
    """Returns a function that returns True if the run in a workdir has logged this step."""

    def has_step(workdir: Path) -> bool:
        from maxlm.telemetry.metrics import read_metrics

        return any(line.get('step', 0) >= step and 'train/loss' in line for line in read_metrics(workdir))

    return has_step


def try_run(
    command: Sequence[str],
    environment: Any,
    workdir: Path,
    *,
    is_done: Callable[[Path], bool],
    seconds: float = TRIAL_SECONDS,
) -> Trial:
    """Starts a run and kills it when `is_done(workdir)`, because a run that finishes saves a complete checkpoint.

    Args:
        command: command that trains.
        environment: environment variables of the process.
        workdir: workdir of the command.
        is_done: returns True when the run can be killed.
        seconds: timeout.
    """
    from maxlm.telemetry.events import read_events
    from maxlm.telemetry.metrics import read_metrics

    began = time.monotonic()
    trouble = ''
    with tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace') as output:
        process = subprocess.Popen(command, env=with_package(environment), stdout=output, stderr=subprocess.STDOUT)
        try:
            while not is_done(workdir) and process.poll() is None:
                if time.monotonic() - began > seconds:
                    trouble = f'not done after {seconds:g} s'
                    break
                time.sleep(POLL_SECONDS)
        finally:
            took = time.monotonic() - began
            _end(process)
        lines = read_metrics(workdir)
        if not trouble and not is_done(workdir) and (process.returncode or not lines):
            output.seek(0)
            trouble = exit_reason(output.read(), process.returncode)
    events = read_events(workdir).lines
    started = [event for event in events if event.get('kind') == 'started']
    return Trial(trouble, lines, (started[-1].get('plan') or {}) if started else {}, took, events)


def evaluate_trial(trial: Trial, *, min_tokens_per_second: float = 0.0) -> CheckResult:
    """Evaluates a trial run. It fails if the throughput is below `min_tokens_per_second`."""
    if trial.trouble:
        return failure(
            f'training does not reach step {STEPS}: {trial.trouble}',
            'run it directly: maxlm train with this config',
        )
    trained = [line for line in trial.lines if 'train/loss' in line]
    if any(line['train/loss'] is None for line in trained):
        return failure('the loss is not finite', 'lower optimizer.learning_rate, or check the data')
    last = trained[-1]
    step = last.get('perf/step_time_seconds') or math.nan
    planned = trial.plan.get('step_seconds')
    message = f'a step takes {step:.3g} s' + (f' (planned {planned:.3g})' if planned else '')
    memory, planned_memory = (last.get('memory/peak_gib') or 0) * GIB, trial.plan.get('memory_bytes')
    if memory:
        message += f', {format_bytes(memory)} per device' + (
            f' (planned {format_bytes(planned_memory)})' if planned_memory else ''
        )
    elif planned_memory:
        message += f', planned memory {format_bytes(planned_memory)}'
    message += f'; startup took {trial.seconds - step * len(trained):.0f} s'
    findings = []
    if trial.tokens_per_second < min_tokens_per_second:
        findings.append(
            failure(
                f'{trial.tokens_per_second:,.0f} tokens/s, below --min-tokens-per-second={min_tokens_per_second:g}; '
                + message,
                'see matmul, links and gpus, or compare with maxlm plan',
            )
        )
    waits = (last.get('perf/data_loading_seconds') or 0) / step
    if waits > WAITING:
        findings.append(
            warning(
                f'{message}; {waits:.0%} of the step waits for data',
                'raise data.num_workers or data.prefetch_buffer_size, or copy the data closer',
            )
        )
    elif planned and step > SLOWER * planned:
        findings.append(warning(f'{message}: {step / planned:.1f} times the plan', 'see matmul, links and gpus'))
    if memory and planned_memory and memory > LARGER * planned_memory:
        findings.append(
            warning(message, 'more memory than planned: leave some free, or lower train.per_device_batch_size')
        )
    return combine(findings or [ok(message)])


def _exists(key: str) -> bool:
    section, _, name = key.partition('.')
    return section in SECTIONS and name in {field.name for field in dataclasses.fields(SECTIONS[section])}


def _end(process: subprocess.Popen) -> None:
    """Kills a process and its children. A process that is only terminated would save first."""
    import psutil

    try:
        family = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    except psutil.NoSuchProcess:
        family = []
    for member in (process, *family):
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
