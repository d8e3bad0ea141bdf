"""The numbers that a dashboard shows, out of what a workdir tells of its run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.monitoring.downsample import Curves
from maxlm.reporting.drawing.curves import Point
from maxlm.storage.json_fields import items, number
from maxlm.telemetry.run_history import RunHistory
from maxlm.telemetry.run_status import FINISHED, RUNNING, STALLED, STARTING, RunStatus, run_status

# So many lines are looked back for the newest value of a metric that not every line has.
LOOK_BACK = 2000
# What the pace is taken from where the run does not say what is left.
PACE_LINES = 20
DRAWN = ('train/loss', 'eval/loss', 'train/grad_norm', 'train/learning_rate', 'perf/tokens_per_second')


class Reading(NamedTuple):
    """The newest reading of one machine.

    Attributes:
        process: its number.
        line: of devices.jsonl.
        age: in seconds.
        share: of its process's time that was spent in steps that count; None = not known.
    """

    process: int
    line: Mapping[str, Any]
    age: float
    share: float | None


@dataclasses.dataclass(frozen=True)
class Facts:
    """A run at one moment. None = not known.

    Attributes:
        name: of the run.
        workdir: of the run.
        now: seconds since 1970.
        condition: its state.
        life: how often it was started.
        step: last one that is done.
        num_steps: of the whole run.
        tokens: positions trained on.
        num_tokens: of the whole run.
        seconds: from the first start to the last sign, pauses between lives included.
        seconds_left: to the end, at the present pace.
        dollars: spent.
        dollars_left: to the end.
        newest: metric → newest value; None = it was not finite.
        evaluated_step: step of the newest validation loss.
        curves: metric → (step, value), condensed.
        shares: where the time of process 0 went: category → seconds; those that took none are left out.
        readings: newest of each machine.
        events: oldest first.
        notes: what is torn, damaged or missing.
    """

    name: str
    workdir: str
    now: float
    condition: RunStatus
    life: int
    step: int
    num_steps: int | None
    tokens: float | None
    num_tokens: float | None
    seconds: float | None
    seconds_left: float | None
    dollars: float | None
    dollars_left: float | None
    newest: Mapping[str, float | None]
    evaluated_step: int | None
    curves: Mapping[str, Sequence[Point]]
    shares: Mapping[str, float]
    readings: Sequence[Reading]
    events: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    @property
    def active(self) -> bool:
        """Whether the run goes on, or may."""
        return self.condition.state in (STARTING, RUNNING, STALLED)


def dashboard_data(history: RunHistory, now: float, curves: Curves | None = None) -> Facts:
    """What a run comes to.

    Args:
        history: of the run.
        now: seconds since 1970.
        curves: `Curves(DRAWN)` that the run was asked for before, so that only what is new is counted.
    """
    metrics, config = history.metrics, history.config
    state = run_status(history, now)
    going = state.state in (STARTING, RUNNING)
    step = _step(history)
    planned = config.train.num_steps if config else number(history.started, 'num_steps')
    num_steps = int(planned) if planned and planned != UNDECIDED_STEPS else None
    tokens_per_step = number(history.started, 'tokens_per_step')
    if config:
        tokens_per_step = config.train.global_batch_size * config.data.seq_len
    newest = _newest(metrics)
    seconds = _seconds(history, now if going else state.last_sign)
    left = (
        0.0 if state.state == FINISHED else _seconds_left(history, step, num_steps, now, going=state.state == RUNNING)
    )
    dollars, dollars_left = _dollars(history, newest, left)
    evaluated = next((line['step'] for line in reversed(metrics[-LOOK_BACK:]) if 'eval/loss' in line), None)
    ledger = history.ledgers.get(0)
    return Facts(
        name=history.name,
        workdir=history.workdir,
        now=now,
        condition=state,
        life=int(number(history.started, 'life') or 0),
        step=step,
        num_steps=num_steps,
        tokens=step * tokens_per_step if tokens_per_step else newest.get('train/tokens'),
        num_tokens=num_steps * tokens_per_step if num_steps and tokens_per_step else None,
        seconds=seconds,
        seconds_left=left,
        dollars=dollars,
        dollars_left=dollars_left,
        newest=newest,
        evaluated_step=evaluated,
        curves=(curves or Curves(DRAWN)).of(metrics),
        shares={name: value for name, value in (ledger.totals if ledger else {}).items() if value > 0},
        readings=[_reading(history, process, now) for process in history.devices],
        events=history.events,
        notes=history.notes,
    )


def devices_of(reading: Reading) -> list[Mapping[str, Any]]:
    """The accelerators that a reading tells of."""
    return [device for device in items(reading.line, 'devices') if isinstance(device, Mapping)]


def _reading(history: RunHistory, process: int, now: float) -> Reading:
    line = history.devices[process][-1]
    ledger = history.ledgers.get(process)
    share = ledger.share if ledger and ledger.seconds > 0 else None
    return Reading(process, line, now - (number(line, 'time') or now), share)


def _step(history: RunHistory) -> int:
    """The last step that is done: what the newer of metrics and ledger says; after a rollback that is a lower one."""
    # A life that has not read its checkpoint yet does not know where it stands.
    known = (line for line in reversed(history.beats.get(0, [])) if number(line, 'step') is not None)
    ends = [*history.metrics[-1:], *itertools.islice(known, 1)]
    newest = max(ends, key=lambda line: number(line, 'time') or 0.0, default=None)
    return int(number(newest, 'step') or 0)


def _newest(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    newest: dict[str, float | None] = {}
    for line in reversed(metrics[-LOOK_BACK:]):
        for name in line:
            if name not in newest:
                newest[name] = number(line, name)
    return newest


def _seconds(history: RunHistory, until: float | None) -> float | None:
    firsts = [number(beats[0], 'began') for beats in history.beats.values()]
    firsts += [number(lines[0], 'time') for lines in (history.events, history.metrics) if lines]
    known = [first for first in firsts if first is not None]
    return max(until - min(known), 0.0) if known and until is not None else None


def _seconds_left(history: RunHistory, step: int, num_steps: int | None, now: float, *, going: bool) -> float | None:
    lines = [line for line in history.metrics[-PACE_LINES:] if 'train/loss' in line]
    if not lines or num_steps is None:
        return None
    told, at = number(lines[-1], 'perf/eta_seconds'), number(lines[-1], 'time')
    if told is not None and at is not None:
        # What has passed since; a run that stands still has no less to do.
        return max(told - max(now - at, 0.0), 0.0) if going else told
    first = number(lines[0], 'time')
    done = lines[-1]['step'] - lines[0]['step']
    if at is None or first is None or done <= 0:
        return None
    return max(num_steps - step, 0) * (at - first) / done


def _dollars(
    history: RunHistory, newest: Mapping[str, float | None], left: float | None
) -> tuple[float | None, float | None]:
    """Spent, and left to spend."""
    at_end, spent = newest.get('cost/projected_dollars'), newest.get('cost/dollars')
    if 0 in history.ledgers and (paid := history.ledgers[0].dollars) is not None:
        # Newer than the metrics, and with what came after the last step.
        spent = max(paid, spent or 0.0)
    if spent is None:
        return None, None
    if at_end is not None:
        return spent, max(at_end - spent, 0.0) if left != 0 else 0.0
    price, count = number(history.started, 'price_per_hour'), number(history.started.get('devices'), 'count')
    if left is None or price is None or count is None:
        return spent, None
    return spent, left / 3600 * price * count
