"""Goodput of a run over all attempts: WORKDIR/goodput.jsonl, and goodput-<N>.jsonl of process N.

A line contains the seconds by category since its attempt began (see `maxlm.telemetry.run_recorder`). This module
computes the totals over attempts from the lines alone. They include lost steps, which a later attempt or a rollback
repeated, and idle time between attempts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.errors import InputError
from maxlm.storage.jsonl import read_lines, truncation_note
from maxlm.workdir.files import goodput_name

# Categories of the time of a running process, in the order of reports.
ACTIVITIES = (
    'start',
    'compile',
    'restore',
    'step',
    'rollout',
    'reward_wait',
    'tool_wait',
    'data_wait',
    'evaluation',
    'checkpoint',
    'replay',
    'other',
)
# Categories that are missing in lines of older versions.
ADDED_LATER = ('rollout', 'reward_wait', 'tool_wait', 'replay')
# Categories that advance the training.
PRODUCTIVE = ('step', 'rollout')
# `lost`: repeated steps. `idle`: time between two attempts.
CATEGORIES = (*ACTIVITIES, 'lost', 'idle')
# A longer time between two attempts is an error of a clock, such as one that began in 1970.
_MAX_IDLE_SECONDS = 366 * 24 * 3600.0
# Categories whose time is lost with a step.
STEP_CATEGORIES = ('step', 'rollout', 'reward_wait', 'tool_wait', 'data_wait', 'evaluation', 'replay')
# Reasons of lines that `compact` keeps in addition to the last line of each attempt.
_PERMANENT = ('saved', 'rollback')


class Attempt(NamedTuple):
    """One attempt of a process of the run.

    Attributes:
        number: number of the attempt, from 1.
        host: host name.
        start_time: start time in seconds since 1970.
        time: time of its last line.
        start_step: step from which it resumed; None until it has read a checkpoint.
        step: last finished step.
        saved_step: newest checkpoint at its last line.
        seconds: seconds by category, over CATEGORIES. `idle` is the time before the attempt.
        dollars: cost; None if no price is known, and for all processes except process 0.
        is_closed: True if the process wrote its last line, so it was not killed.
    """

    number: int
    host: str
    start_time: float
    time: float
    start_step: int | None
    step: int | None
    saved_step: int | None
    seconds: dict[str, float]
    dollars: float | None
    is_closed: bool

    @property
    def active_seconds(self) -> float:
        """Seconds of its process."""
        return sum(self.seconds.values()) - self.seconds['idle']


class GoodputLog(NamedTuple):
    """Goodput log of one process.

    Attributes:
        attempts: attempts, oldest first.
        notes: notes about unreadable lines of the file.
    """

    attempts: list[Attempt]
    notes: list[str]

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by category over all attempts."""
        return {name: sum(attempt.seconds[name] for attempt in self.attempts) for name in CATEGORIES}

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first attempt to the last line of the last one."""
        return sum(self.totals.values())

    @property
    def fraction(self) -> float:
        """Productive seconds, including rollouts, as a fraction of all seconds; 0 without lines."""
        return sum(self.totals[name] for name in PRODUCTIVE) / self.seconds if self.attempts else 0.0

    @property
    def dollars(self) -> float | None:
        """Cost of all attempts with a known price, or None if no price is known."""
        costs = [attempt.dollars for attempt in self.attempts if attempt.dollars is not None]
        return sum(costs) if costs else None

    @property
    def dollars_by_category(self) -> dict[str, float] | None:
        """Cost of all attempts with a known price by category, or None if no price is known.

        The time between attempts costs nothing.
        """
        if self.dollars is None:
            return None
        dollars = dict.fromkeys(CATEGORIES, 0.0)
        for attempt in self.attempts:
            seconds = {**attempt.seconds, 'idle': 0.0}
            for category in CATEGORIES:
                dollars[category] += (attempt.dollars or 0.0) * seconds[category] / (sum(seconds.values()) or 1.0)
        return dollars


def read_goodput(workdir: Path, process: int = 0, *, count_lost: bool = True) -> GoodputLog:
    """Reads the goodput log of one process. The log of process 0 represents the run.

    Args:
        workdir: workdir of the run.
        process: index of the process.
        count_lost: see `attempts_of`.

    Raises:
        InputError: a line other than the last is not JSON, or is not a line of a goodput log.
    """
    name = goodput_name(process)
    lines, truncated = read_lines(workdir / name)
    try:
        attempts = attempts_of(lines, count_lost=count_lost)
    except (KeyError, TypeError) as error:
        raise InputError(
            f'{workdir / name}: not a goodput log of maxlm ({error!r}); move the file elsewhere'
        ) from error
    return GoodputLog(attempts, [truncation_note(name)] if truncated else [])


def attempts_of(lines: Sequence[dict[str, Any]], *, count_lost: bool = True) -> list[Attempt]:
    """Converts the lines of one process to attempts.

    A later attempt or a rollback continues from an earlier step. The seconds of the steps after it become `lost`, with
    their data waits and evaluations. They are exact, because a line is written at every save.

    Args:
        lines: lines, oldest first.
        count_lost: mark lost steps. If False, their seconds keep their categories.
    """
    attempts: list[Attempt] = []
    intervals: list[_Interval] = []
    for _, group in itertools.groupby(lines, key=lambda line: line['life']):
        own = list(group)
        attempt = _make_attempt(own, attempts[-1].time if attempts else own[0]['began'])
        attempts.append(attempt)
        if count_lost and attempt.start_step is not None:
            _mark_lost_after(intervals, attempt.start_step)
        for before, line in itertools.pairwise([{'step': attempt.start_step, 'seconds': {}}, *own]):
            if line['step'] is None:
                continue
            intervals.append(_make_interval(attempt, before, line))
            if count_lost and line['why'] == 'rollback':
                _mark_lost_after(intervals, line['step'])
    return attempts


@dataclasses.dataclass
class _Interval:
    """Seconds of the steps after `first` up to `last`, between two lines of an attempt.

    Attributes:
        attempt: attempt of the lines.
        first: step of the first line.
        last: step of the second line.
        seconds: seconds by category.
        is_final: True if the attempt ended with this interval, so there is no unfinished step.
    """

    attempt: Attempt
    first: int
    last: int
    seconds: dict[str, float]
    is_final: bool

    def mark_lost(self, fraction: float) -> None:
        for name, seconds in self.seconds.items():
            self.attempt.seconds[name] -= fraction * seconds
            self.attempt.seconds['lost'] += fraction * seconds


def _make_attempt(lines: Sequence[dict[str, Any]], previous_end: float) -> Attempt:
    """Converts the lines of one attempt. `previous_end` is the time of the last line of the previous attempt."""
    began, last = lines[0]['began'], lines[-1]
    seconds = {name: seconds_of(last, name) for name in ACTIVITIES}
    seconds |= {'lost': 0.0, 'idle': idle_seconds(previous_end, began)}
    return Attempt(
        number=last['life'],
        host=last['host'],
        start_time=began,
        time=last['time'],
        start_step=last['start_step'],
        step=last['step'],
        saved_step=last['saved_step'],
        seconds=seconds,
        dollars=last['dollars'],
        is_closed=last['why'] == 'end',
    )


def idle_seconds(previous_end: float, began: float) -> float:
    """Returns the seconds between two attempts; 0 if the clocks of their hosts cannot be right."""
    seconds = began - previous_end
    return seconds if 0.0 < seconds < _MAX_IDLE_SECONDS else 0.0


def seconds_of(line: dict[str, Any], name: str) -> float:
    """Returns the seconds of a category in a line. Raises KeyError if a required category is missing."""
    seconds = line['seconds']
    return float(seconds.get(name, 0.0) if name in ADDED_LATER else seconds[name])


def _make_interval(attempt: Attempt, before: dict[str, Any], line: dict[str, Any]) -> _Interval:
    first = before['step'] if before['step'] is not None else attempt.start_step or 0
    seconds = {name: seconds_of(line, name) - before['seconds'].get(name, 0.0) for name in STEP_CATEGORIES}
    # The line of a rollback contains the step to which the run returns.
    return _Interval(attempt, first, max(first, line['step']), seconds, line['why'] == 'end')


def _mark_lost_after(intervals: list[_Interval], step: int) -> None:
    """Marks the steps after `step` as lost, because the run continues from `step`."""
    while intervals:
        newest = intervals[-1]
        is_unfinished = newest.first == newest.last == step and not newest.is_final
        if newest.last <= step and not is_unfinished:
            return
        if newest.first < step:
            # The time of `step` is between two lines, so interpolate.
            newest.mark_lost((newest.last - step) / (newest.last - newest.first))
            newest.last = step
            return
        newest.mark_lost(1.0)
        intervals.pop()


def compact(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines that `attempts_of` needs: saves, rollbacks and the last line of each attempt."""
    remaining = []
    for _, group in itertools.groupby(lines, key=lambda line: line['life']):
        own = list(group)
        remaining += [line for line in own[:-1] if line.get('why') in _PERMANENT]
        remaining.append(own[-1])
    return remaining
