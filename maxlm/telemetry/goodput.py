"""Goodput of a run over all attempts: WORKDIR/goodput.jsonl, and goodput-<N>.jsonl of process N.

A line holds seconds by category since its attempt began (see `maxlm.telemetry.run_recorder`). The sum over attempts
is computed here from the lines alone: which steps were lost, because a later attempt or a rollback repeated them,
and how long nothing ran at all.
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
ACTIVITIES = ('start', 'compile', 'restore', 'step', 'rollout', 'data_wait', 'evaluation', 'checkpoint', 'other')
# Categories that lines of older versions do not have.
ADDED_LATER = ('rollout',)
# Categories that advance the training.
PRODUCTIVE = ('step', 'rollout')
# `lost`: steps that were repeated; `idle`: nothing ran between two attempts.
CATEGORIES = (*ACTIVITIES, 'lost', 'idle')
# Categories that are lost with a step.
STEP_CATEGORIES = ('step', 'rollout', 'data_wait', 'evaluation')
# Lines that stay when a file is compacted, besides the last one of each attempt.
_PERMANENT = ('saved', 'rollback')


class Attempt(NamedTuple):
    """One start of a process of the run.

    Attributes:
        number: from 1.
        host: name of the machine.
        start_time: seconds since 1970.
        time: of its last line.
        start_step: that it went on from; None as long as it has read no checkpoint.
        step: the last that was done.
        saved_step: newest checkpoint at its last line.
        seconds: by category, over CATEGORIES; `idle` is the time before the attempt.
        dollars: that it cost; None where no price is known, and in ledgers of other processes than the first.
        is_closed: the process wrote its last line, so it was not killed.
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


class GoodputLog(NamedTuple):
    """The attempts of one process of a run, oldest first, and notes on unreadable lines of its file."""

    attempts: list[Attempt]
    notes: list[str]

    @property
    def totals(self) -> dict[str, float]:
        """Returns seconds by category over all attempts."""
        return {name: sum(attempt.seconds[name] for attempt in self.attempts) for name in CATEGORIES}

    @property
    def seconds(self) -> float:
        """Returns the seconds from the start of the first attempt to the last line of the last one."""
        return sum(self.totals.values())

    @property
    def fraction(self) -> float:
        """Returns productive seconds, rollouts included, as a fraction of all seconds; 0 without lines."""
        return sum(self.totals[name] for name in PRODUCTIVE) / self.seconds if self.attempts else 0.0

    @property
    def dollars(self) -> float | None:
        """Returns the cost of all attempts with a known price; None if no price is known."""
        costs = [attempt.dollars for attempt in self.attempts if attempt.dollars is not None]
        return sum(costs) if costs else None


def read_goodput(workdir: Path, process: int = 0, *, count_lost: bool = True) -> GoodputLog:
    """Reads the goodput log of one process; that of process 0 stands for the run.

    Args:
        workdir: of the run.
        process: its number.
        count_lost: as for `attempts_of`.

    Raises:
        InputError: a line that is not the last is not JSON, or is not a line of a goodput log.
    """
    name = goodput_name(process)
    lines, truncated = read_lines(workdir / name)
    try:
        attempts = attempts_of(lines, count_lost=count_lost)
    except (KeyError, TypeError) as error:
        raise InputError(f'{workdir / name}: not a ledger that maxlm wrote ({error!r}); move it elsewhere') from error
    return GoodputLog(attempts, [truncation_note(name)] if truncated else [])


def attempts_of(lines: Sequence[dict[str, Any]], *, count_lost: bool = True) -> list[Attempt]:
    """Converts the lines of one process to attempts.

    Seconds of steps after the one that a later attempt, or a rollback, continued from are `lost`, with the
    waits for their data and the evaluations between them. As a line is written at every save these are known exactly.

    Args:
        lines: oldest first.
        count_lost: without it they stay what they were.
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
    """Seconds of the steps after `first` up to `last`, between two lines of an attempt."""

    attempt: Attempt
    first: int
    last: int
    seconds: dict[str, float]
    # The attempt ended with it, without an unfinished step.
    is_final: bool

    def mark_lost(self, fraction: float) -> None:
        for name, seconds in self.seconds.items():
            self.attempt.seconds[name] -= fraction * seconds
            self.attempt.seconds['lost'] += fraction * seconds


def _make_attempt(lines: Sequence[dict[str, Any]], previous_end: float) -> Attempt:
    """Makes an attempt from its lines and the time of the last line before them."""
    began, last = lines[0]['began'], lines[-1]
    seconds = {name: seconds_of(last, name) for name in ACTIVITIES}
    # Clocks of two machines differ.
    seconds |= {'lost': 0.0, 'idle': max(0.0, began - previous_end)}
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


def seconds_of(line: dict[str, Any], name: str) -> float:
    """Returns the seconds of a category in a line; raises KeyError if the line lacks a required category."""
    seconds = line['seconds']
    return float(seconds.get(name, 0.0) if name in ADDED_LATER else seconds[name])


def _make_interval(attempt: Attempt, before: dict[str, Any], line: dict[str, Any]) -> _Interval:
    first = before['step'] if before['step'] is not None else attempt.start_step or 0
    seconds = {name: seconds_of(line, name) - before['seconds'].get(name, 0.0) for name in STEP_CATEGORIES}
    # The line of a rollback has the step that it goes back to.
    return _Interval(attempt, first, max(first, line['step']), seconds, line['why'] == 'end')


def _mark_lost_after(intervals: list[_Interval], step: int) -> None:
    """Marks the steps after `step` as lost, since the run continues from there."""
    while intervals:
        newest = intervals[-1]
        is_unfinished = newest.first == newest.last == step and not newest.is_final
        if newest.last <= step and not is_unfinished:
            return
        if newest.first < step:
            # No line tells when it was done.
            newest.mark_lost((newest.last - step) / (newest.last - newest.first))
            newest.last = step
            return
        newest.mark_lost(1.0)
        intervals.pop()


def compact(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drops the lines that `attempts_of` does not need: all but saves, rollbacks and the last of each attempt."""
    remaining = []
    for _, group in itertools.groupby(lines, key=lambda line: line['life']):
        own = list(group)
        remaining += [line for line in own[:-1] if line.get('why') in _PERMANENT]
        remaining.append(own[-1])
    return remaining
