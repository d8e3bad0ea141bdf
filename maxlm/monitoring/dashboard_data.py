"""Computes the values of a dashboard from the files of a workdir."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.reporting.curves import Point, curve
from maxlm.storage.json_fields import items, number
from maxlm.telemetry.run_history import RunHistory
from maxlm.telemetry.run_status import FINISHED, RUNNING, STALLED, STARTING, RunStatus, run_status

# Number of lines to search for the latest value of a metric.
MAX_LOOKBACK_LINES = 2000
# Number of lines used to estimate the remaining time if the run does not log it.
ETA_LINES = 20
PLOTTED_METRICS = ('train/loss', 'eval/loss', 'train/grad_norm', 'train/learning_rate', 'perf/tokens_per_second')


class Reading(NamedTuple):
    """The newest reading of one machine.

    Attributes:
        process: index of the process.
        line: line of devices.jsonl.
        age: age in seconds.
        fraction: fraction of the process's time that was spent in steps that were kept; None: unknown.
    """

    process: int
    line: Mapping[str, Any]
    age: float
    fraction: float | None


@dataclasses.dataclass(frozen=True)
class RunSnapshot:
    """State of a run at one time. None means unknown.

    Attributes:
        name: name of the run.
        now: seconds since 1970.
        status: status of the run.
        attempt: number of the current attempt.
        step: last completed step.
        num_steps: number of steps of the run.
        tokens: number of positions trained on.
        num_tokens: number of tokens of the run.
        seconds: time from the first start to the last heartbeat, including pauses between attempts.
        seconds_left: time until the end, at the current throughput.
        dollars: dollars spent.
        dollars_left: dollars until the end.
        latest: metric → latest value; None: it was not finite.
        last_eval_step: step of the latest validation loss.
        curves: metric → (step, value) points.
        seconds_by_category: category → seconds of process 0; only values above 0.
        readings: newest reading of each machine.
        events: events, oldest first.
        notes: problems with the files: truncated, corrupt or missing.
    """

    name: str
    now: float
    status: RunStatus
    attempt: int
    step: int
    num_steps: int | None
    tokens: float | None
    num_tokens: float | None
    seconds: float | None
    seconds_left: float | None
    dollars: float | None
    dollars_left: float | None
    latest: Mapping[str, float | None]
    last_eval_step: int | None
    curves: Mapping[str, Sequence[Point]]
    seconds_by_category: Mapping[str, float]
    readings: Sequence[Reading]
    events: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    @property
    def is_active(self) -> bool:
        """Returns True if the run continues or may continue."""
        return self.status.state in (STARTING, RUNNING, STALLED)


class Curves:
    """Curves of several metrics of one run, which are extended when the run writes new lines."""

    def __init__(self, names: Sequence[str]):
        self._points: dict[str, list[Point]] = {name: [] for name in names}
        self._num_lines = 0
        self._ends: list[Mapping[str, Any]] = []

    def update(self, metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[Point]]:
        """Returns metric → points.

        Args:
            metrics: the lines of the previous call with new lines appended. Any other lines reset the curves.
        """
        known = self._num_lines
        if len(metrics) < known or [*metrics[:1], *metrics[max(0, known - 1) : known]] != self._ends:
            self._points, known = {name: [] for name in self._points}, 0
        for name, points in self._points.items():
            points += curve(metrics[known:], name)
        self._num_lines, self._ends = len(metrics), [*metrics[:1], *metrics[-1:]]
        return self._points


def dashboard_data(history: RunHistory, now: float, curves: Curves | None = None) -> RunSnapshot:
    """Summarizes a run.

    Args:
        history: files of the run.
        now: seconds since 1970.
        curves: `Curves(PLOTTED_METRICS)` of a previous call for this run, so that only new lines are processed.
    """
    metrics, config = history.metrics, history.config
    state = run_status(history, now)
    is_alive = state.state in (STARTING, RUNNING)
    step = _step(history)
    planned = config.train.num_steps if config else number(history.started, 'num_steps')
    num_steps = int(planned) if planned and planned != UNDECIDED_STEPS else None
    tokens_per_step = number(history.started, 'tokens_per_step')
    if config:
        tokens_per_step = config.train.global_batch_size * config.data.seq_len
    latest = _latest_values(metrics)
    seconds = _seconds(history, now if is_alive else state.last_heartbeat)
    seconds_left = (
        0.0
        if state.state == FINISHED
        else _seconds_left(history, step, num_steps, now, is_running=state.state == RUNNING)
    )
    dollars, dollars_left = _dollars(history, latest, seconds_left)
    last_eval_step = next(
        (line['step'] for line in reversed(metrics[-MAX_LOOKBACK_LINES:]) if 'eval/loss' in line), None
    )
    goodput_log = history.goodput_logs.get(0)
    return RunSnapshot(
        name=history.name,
        now=now,
        status=state,
        attempt=int(number(history.started, 'life') or 0),
        step=step,
        num_steps=num_steps,
        tokens=step * tokens_per_step if tokens_per_step else latest.get('train/tokens'),
        num_tokens=num_steps * tokens_per_step if num_steps and tokens_per_step else None,
        seconds=seconds,
        seconds_left=seconds_left,
        dollars=dollars,
        dollars_left=dollars_left,
        latest=latest,
        last_eval_step=last_eval_step,
        curves=(curves or Curves(PLOTTED_METRICS)).update(metrics),
        seconds_by_category={
            name: value for name, value in (goodput_log.totals if goodput_log else {}).items() if value > 0
        },
        readings=[_reading(history, process, now) for process in history.devices],
        events=history.events,
        notes=history.notes,
    )


def devices_of(reading: Reading) -> list[Mapping[str, Any]]:
    """Returns the accelerators of a reading."""
    return [device for device in items(reading.line, 'devices') if isinstance(device, Mapping)]


def _reading(history: RunHistory, process: int, now: float) -> Reading:
    line = history.devices[process][-1]
    goodput_log = history.goodput_logs.get(process)
    fraction = goodput_log.fraction if goodput_log and goodput_log.seconds > 0 else None
    return Reading(process, line, max(0.0, now - (number(line, 'time') or now)), fraction)


def _step(history: RunHistory) -> int:
    """Returns the last completed step, from the newer of metrics and heartbeats; it is lower after a rollback."""
    # Heartbeats before the checkpoint is restored have no step.
    beats_with_step = (line for line in reversed(history.heartbeats.get(0, [])) if number(line, 'step') is not None)
    last_lines = [*history.metrics[-1:], *itertools.islice(beats_with_step, 1)]
    latest = max(last_lines, key=lambda line: number(line, 'time') or 0.0, default=None)
    return int(number(latest, 'step') or 0)


def _latest_values(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    latest: dict[str, float | None] = {}
    for line in reversed(metrics[-MAX_LOOKBACK_LINES:]):
        for name in line:
            if name not in latest:
                latest[name] = number(line, name)
    return latest


def _seconds(history: RunHistory, until: float | None) -> float | None:
    if until is not None and (log := history.goodput_logs.get(0)):
        # Unlike the times of lines, its seconds do not jump with the clock.
        return log.seconds + max(until - log.attempts[-1].time, 0.0)
    firsts = [number(beats[0], 'began') for beats in history.heartbeats.values()]
    firsts += [number(lines[0], 'time') for lines in (history.events, history.metrics) if lines]
    start_times = [first for first in firsts if first is not None]
    return max(until - min(start_times), 0.0) if start_times and until is not None else None


def _seconds_left(
    history: RunHistory, step: int, num_steps: int | None, now: float, *, is_running: bool
) -> float | None:
    lines = [line for line in history.metrics[-ETA_LINES:] if 'train/loss' in line]
    if not lines or num_steps is None:
        return None
    eta, time = number(lines[-1], 'perf/eta_seconds'), number(lines[-1], 'time')
    if eta is not None and time is not None:
        # Subtract the time since the line was written, unless the run has stopped and makes no progress.
        return max(eta - max(now - time, 0.0), 0.0) if is_running else eta
    first = number(lines[0], 'time')
    num_done = lines[-1]['step'] - lines[0]['step']
    if time is None or first is None or num_done <= 0:
        return None
    return max(num_steps - step, 0) * max(time - first, 0.0) / num_done


def _dollars(
    history: RunHistory, latest: Mapping[str, float | None], seconds_left: float | None
) -> tuple[float | None, float | None]:
    """Returns the dollars spent and the dollars until the end."""
    projected, spent = latest.get('cost/projected_dollars'), latest.get('cost/dollars')
    if 0 in history.goodput_logs and (paid := history.goodput_logs[0].dollars) is not None:
        # The goodput log is newer than the metrics, and includes the time after the last step.
        spent = max(paid, spent or 0.0)
    if spent is None:
        return None, None
    if projected is not None:
        return spent, max(projected - spent, 0.0) if seconds_left != 0 else 0.0
    price, count = number(history.started, 'price_per_hour'), number(history.started.get('devices'), 'count')
    if seconds_left is None or price is None or count is None:
        return spent, None
    return spent, seconds_left / 3600 * price * count
