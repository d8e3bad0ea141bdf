"""Properties of one run for the page, derived from its history."""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from maxlm.config.serialization import public_command
from maxlm.formatting import GIB
from maxlm.hardware.identity import summary
from maxlm.reporting.charts import Mark, MarkKind
from maxlm.reporting.curves import Point, curve, finite
from maxlm.reporting.overfitting import Overfitting, find_overfitting
from maxlm.storage.json_fields import items, mapping, number, text
from maxlm.telemetry.goodput import GoodputLog
from maxlm.telemetry.run_history import RunHistory
from maxlm.telemetry.run_status import RunStatus, run_status

# Kinds of events that are drawn as vertical lines on the curves, in addition to all alerts.
_MARK_KINDS: dict[str, MarkKind] = {
    **{'resumed': 'restart', 'rollback': 'restart'},
    **dict.fromkeys(('length', 'context', 'batch', 'schedule'), 'change'),
    **{'failed': 'alert', 'diverged': 'alert'},
}


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    """A run at the time `now`, in seconds since 1970.

    Attributes:
        history: files of its workdir.
        name: name of the run on the page.
        color: index of its color.
        now: time at which the page is created.
    """

    history: RunHistory
    name: str
    color: int
    now: float

    @cached_property
    def status(self) -> RunStatus:
        return run_status(self.history, self.now)

    @cached_property
    def start_events(self) -> list[dict[str, Any]]:
        """Returns the `started` events, one for each attempt."""
        return [event for event in self.history.events if event.get('kind') == 'started']

    @property
    def started(self) -> Mapping[str, Any]:
        """Returns the newest `started` event; empty if there is none."""
        return self.start_events[-1] if self.start_events else {}

    @property
    def plan(self) -> dict[str, Any]:
        """Returns the forecast at the newest start; empty if there is none."""
        return mapping(self.started, 'plan')

    @property
    def command(self) -> list[str]:
        # Earlier versions recorded the values of all keys.
        return public_command([str(argument) for argument in items(self.started, 'command')])

    @property
    def shell_command(self) -> str:
        return shlex.join(self.command)

    @property
    def origin(self) -> list[str]:
        """Returns the commit and the host of the newest attempt, as sentences."""
        git, host = mapping(self.started, 'git'), text(self.started, 'host')
        commit, dirty = text(git, 'commit'), ', with uncommitted changes' if git.get('dirty') is True else ''
        sentences = [f'maxlm at commit {commit}{dirty}.' if commit else '', f'Started on {host}.' if host else '']
        return [sentence for sentence in sentences if sentence]

    @property
    def versions(self) -> list[tuple[str, str]]:
        """Returns the versions of libraries, and fingerprints and weights of the data."""
        data = {name: value for name, value in mapping(self.started, 'dataset').items() if name != 'sources'}
        weights = {f'weight of {name}': weight for name, _, weight in self.dataset if weight is not None}
        rows = (
            mapping(self.started, 'versions')
            | self._identities()
            | {f'data: {name}': value for name, value in (data | weights).items()}
        )
        return [(name, '' if value is None else str(value)) for name, value in rows.items()]

    def _identities(self) -> dict[str, str]:
        """Returns the devices of each process, with their libraries, as text."""
        return {
            f'devices of process {process}': summary(identity)
            for process, identity in enumerate(items(self.started, 'identity'))
        }

    @property
    def is_unfinished(self) -> bool:
        return bool(self.num_steps and (self.step or 0) < self.num_steps)

    @property
    def has_costs(self) -> bool:
        """Returns True if there is a goodput log, or checkpoints whose storage costs money."""
        return bool(self.goodput_log or self.history.stored)

    @property
    def has_devices(self) -> bool:
        """Returns True if there are readings of accelerators, besides those of hosts."""
        return any(items(line, 'devices') for lines in self.history.devices.values() for line in lines)

    @cached_property
    def training(self) -> list[Point]:
        return self.metric('train/loss')

    @cached_property
    def validation(self) -> list[Point]:
        return self.metric('eval/loss')

    @cached_property
    def best(self) -> tuple[float, float] | None:
        """Returns (step, loss) of the evaluation with the lowest loss."""
        return min(finite(self.validation), key=lambda point: point[1], default=None)

    @property
    def unigram_entropy(self) -> float | None:
        """Returns the entropy of the token frequencies of the validation data, in nats per token."""
        return number(mapping(self.started, 'baseline'), 'unigram_entropy')

    def bits_per_byte(self, loss: float) -> float | None:
        """Converts a validation loss in nats per token, if the size of the validation text is known."""
        return loss / self.bytes_per_token / math.log(2) if self.bytes_per_token else None

    @property
    def bytes_per_token(self) -> float | None:
        """Returns the bytes of the validation text per token, if the size of the text is known."""
        tokens_per_byte = number(mapping(self.started, 'baseline'), 'tokens_per_byte')
        return 1 / tokens_per_byte if tokens_per_byte else None

    @property
    def compression(self) -> dict[str, Any]:
        """Returns kind of text → tokenizer → bytes per token; empty if the run recorded none."""
        return mapping(self.started, 'bytes_per_token')

    @property
    def predicts_tokens(self) -> bool:
        """Returns True if the loss is that of the next token, and not of preferences or rewards."""
        return not {'rollout/reward', 'train/rewards/margins'} & set(self.names)

    @property
    def objective(self) -> str:
        """Returns train.objective; '' if the config cannot be read."""
        return self.history.config.train.objective if self.history.config else ''

    @property
    def data(self) -> dict[str, Any]:
        """Returns fingerprints and weights of the data sets; empty if the `started` event has none."""
        kinds = ('dataset', 'weight', 'weights', 'prompts')
        return {key: value for key, value in mapping(self.started, 'dataset').items() if key.split(' ')[0] in kinds}

    @cached_property
    def overfitting(self) -> Overfitting | None:
        # Training and validation losses of other objectives are not comparable.
        return find_overfitting(self.training, self.validation) if self.predicts_tokens else None

    @cached_property
    def names(self) -> list[str]:
        """Returns the names of all metrics, in order of appearance."""
        return list(dict.fromkeys(name for line in self.history.metrics for name in line))

    @cached_property
    def _curves(self) -> dict[tuple[str, float], list[Point]]:
        return {}

    def metric(self, name: str, factor: float = 1.0) -> list[Point]:
        """Returns the (step, value) points of a metric, multiplied by `factor`."""
        if (name, factor) not in self._curves:
            self._curves[name, factor] = curve(self.history.metrics, name, factor)
        return self._curves[name, factor]

    def sources(self, prefix: str) -> list[str]:
        """Returns the names of the sources that have a metric, such as train/loss."""
        return sorted(name.removeprefix(f'{prefix}/') for name in self.names if name.startswith(f'{prefix}/'))

    def median(self, name: str) -> float | None:
        values = [value for _, value in finite(self.metric(name))]
        return statistics.median(values) if values else None

    def highest(self, name: str) -> float | None:
        return max((value for _, value in finite(self.metric(name))), default=None)

    def last(self, name: str) -> float | None:
        return next((value for _, value in reversed(finite(self.metric(name)))), None)

    @cached_property
    def step(self) -> int | None:
        """Returns the last step that is known to be completed."""
        steps = [number(line, 'step') for line in (*self.history.metrics[-1:], *self.history.events[-1:])]
        beats = self.history.heartbeats.get(0, [])
        steps += [number(beat, 'step') for beat in beats[-1:]]
        return max((int(step) for step in steps if step is not None), default=None)

    @cached_property
    def num_steps(self) -> int | None:
        """Returns the most recently decided number of steps."""
        planned = number(self.started, 'num_steps')
        if self.history.config is not None:
            planned = self.history.config.train.num_steps or planned
        return int(planned) if planned else None

    @cached_property
    def tokens_per_step(self) -> float | None:
        config = self.history.config
        if config is not None and config.train.global_batch_size and config.data.seq_len:
            return float(config.train.global_batch_size * config.data.seq_len)
        return number(self.started, 'tokens_per_step')

    @cached_property
    def num_devices(self) -> int:
        """Returns the number of devices of the latest attempt; 1 if unknown."""
        return int(number(mapping(self.started, 'devices'), 'count') or 1)

    @property
    def goodput_log(self) -> GoodputLog | None:
        """Returns the goodput log of process 0, which represents the run."""
        return self.history.goodput_logs.get(0)

    @cached_property
    def start_time(self) -> float:
        """Returns the start time in seconds since 1970; 0 if unknown."""
        beats = [number(beat, 'began') for beats in self.history.heartbeats.values() for beat in beats[:1]]
        files = [self.history.events, self.history.metrics, *self.history.devices.values()]
        times = [number(line, 'time') for lines in files for line in lines[:1]]
        return min((time for time in (*beats, *times) if time is not None), default=0.0)

    @cached_property
    def wall_seconds(self) -> float | None:
        """Returns the seconds from the start of the first attempt to the last heartbeat of the run."""
        if self.goodput_log:
            # Unlike the times of lines, it does not jump with the clock.
            return self.goodput_log.seconds
        sign = self.status.last_heartbeat
        return sign - self.start_time if sign is not None and self.start_time else None

    @cached_property
    def dollars(self) -> float | None:
        """Returns the cost of all attempts on all devices; None if no price is known."""
        known = [
            goodput_log.dollars for goodput_log in self.history.goodput_logs.values() if goodput_log.dollars is not None
        ]
        return sum(known) if known else self.last('cost/dollars')

    @cached_property
    def marks(self) -> list[Mark]:
        """Returns the marks for curves over steps."""
        marks = []
        for event in self.history.events:
            kind = text(event, 'kind')
            step = number(event, 'from_step' if kind == 'resumed' else 'step')
            is_alert = event.get('alert') is True
            if step is None or (kind not in _MARK_KINDS and not is_alert):
                continue
            marks.append(Mark(step, _MARK_KINDS.get(kind, 'alert'), f'{kind}: {text(event, "message")}'))
        return marks

    @cached_property
    def time_marks(self) -> list[Mark]:
        """Returns the marks for curves over time."""
        marks = []
        for event in self.history.events:
            kind, time = text(event, 'kind'), number(event, 'time')
            is_restart = kind == 'started' and (number(event, 'life') or 1) > 1
            mark_kind = _MARK_KINDS.get(kind, 'alert' if event.get('alert') is True else None)
            if is_restart:
                mark_kind = 'restart'
            if time is None or mark_kind is None or mark_kind == 'change' or kind == 'resumed':
                continue
            marks.append(Mark(time - self.start_time, mark_kind, f'{kind}: {text(event, "message")}'))
        return marks

    @cached_property
    def dataset(self) -> list[tuple[str, float | None, float | None]]:
        """Returns (name, tokens, weight) of each source of the data."""
        sources = items(mapping(self.started, 'dataset'), 'sources')
        return [(text(one, 'name'), number(one, 'tokens'), number(one, 'weight')) for one in sources]

    @property
    def source_names(self) -> list[str]:
        return [name for name, _, _ in self.dataset if name]

    @property
    def memory_bytes(self) -> float | None:
        """Returns the peak memory of one device."""
        peak_gib = self.highest('memory/peak_gib')
        return None if peak_gib is None else peak_gib * GIB


def make_runs(histories: list[RunHistory], now: float) -> list[ReportedRun]:
    """Returns the runs of a page. Runs whose directories have the same name are identified by their paths."""
    names = [history.name for history in histories]
    return [
        ReportedRun(history, name if names.count(name) == 1 else history.workdir, color, now)
        for color, (history, name) in enumerate(zip(histories, names, strict=True))
    ]


def comparable(runs: Sequence[ReportedRun], *, source: str = '') -> tuple[list[list[ReportedRun]], list[str]]:
    """Groups runs whose losses are comparable, for one data source or for all data.

    Returns:
        The groups, and the properties that differ between them: objectives, data or both.
    """
    groups: list[list[ReportedRun]] = []
    reasons: set[str] = set()
    for run in runs:
        for group in groups:
            found = {reason for one in group for reason in _differences(run, one, source)}
            if not found:
                group.append(run)
                break
            reasons |= found
        else:
            groups.append([run])
    return groups, sorted(reasons)


def _differences(one: ReportedRun, other: ReportedRun, source: str) -> list[str]:
    def comparable_properties(run: ReportedRun) -> dict[str, Any]:
        return {'objectives': run.objective, 'data': run.data.get(f'dataset {source}') if source else run.data}

    first, second = comparable_properties(one), comparable_properties(other)
    # A property that is missing in a workdir counts as equal.
    return [name for name in first if first[name] and second[name] and first[name] != second[name]]


def ratio(actual: float | None, predicted: float | None) -> float | None:
    """Returns actual / predicted; None if either is unknown."""
    if actual is None or not predicted or not math.isfinite(actual):
        return None
    return actual / predicted
