"""Where the time of a run went, over all of its lives: WORKDIR/goodput.jsonl, and goodput-<N>.jsonl of process N.

A line holds seconds by category since its life began (see `maxlm.telemetry.run_recorder`). What they come to over lives
is worked out here, from lines alone: which steps were done in vain, since a later life or a rollback did them again,
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

# What a process can be doing, in the order in which it is told.
ACTIVITIES = ('start', 'compile', 'restore', 'step', 'rollout', 'data_wait', 'evaluation', 'checkpoint', 'other')
# Those that a line does not have that was written before there was such a thing.
ADDED_LATER = ('rollout',)
# Without which no model would come about.
PRODUCTIVE = ('step', 'rollout')
# Steps that were done again; nothing ran between two lives.
CATEGORIES = (*ACTIVITIES, 'lost', 'idle')
# What is lost with a step.
STEP_CATEGORIES = ('step', 'rollout', 'data_wait', 'evaluation')
# Lines that stay when a file is made shorter, besides the last one of each life.
_PERMANENT = ('saved', 'rollback')


class Attempt(NamedTuple):
    """One start of a process of the run.

    Attributes:
        number: from 1.
        host: name of the machine.
        began: seconds since 1970.
        time: of its last line.
        start_step: that it went on from; None as long as it has read no checkpoint.
        step: the last that was done.
        saved_step: newest checkpoint at its last line.
        seconds: by category, over CATEGORIES; `idle` is the time before the life.
        dollars: that it cost; None where no price is known, and in ledgers of other processes than the first.
        closed: it has come to an end of its own, of whatever kind, and was not killed.
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
    """The lives of one process of a run, oldest first, and what of its file could not be read."""

    attempts: list[Attempt]
    notes: list[str]

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by category over all lives."""
        return {name: sum(attempt.seconds[name] for attempt in self.attempts) for name in CATEGORIES}

    @property
    def seconds(self) -> float:
        """From the beginning of the first life to the last line of the last."""
        return sum(self.totals.values())

    @property
    def fraction(self) -> float:
        """Seconds of steps that count, rollouts included, as a share of all; 0 of a run without lines."""
        return sum(self.totals[name] for name in PRODUCTIVE) / self.seconds if self.attempts else 0.0

    @property
    def dollars(self) -> float | None:
        """Of all lives whose price is known; None where no price is."""
        costs = [attempt.dollars for attempt in self.attempts if attempt.dollars is not None]
        return sum(costs) if costs else None


def read_goodput(workdir: Path, process: int = 0, *, count_lost: bool = True) -> GoodputLog:
    """The ledger of one process; a run's is that of process 0.

    Args:
        workdir: of the run.
        process: its number.
        count_lost: as for `attempts_of`.

    Raises:
        InputError: a line that is not the last is not JSON, or is not one of a ledger.
    """
    name = goodput_name(process)
    lines, truncated = read_lines(workdir / name)
    try:
        attempts = attempts_of(lines, count_lost=count_lost)
    except (KeyError, TypeError) as error:
        raise InputError(f'{workdir / name}: not a ledger that maxlm wrote ({error!r}); move it elsewhere') from error
    return GoodputLog(attempts, [truncation_note(name)] if truncated else [])


def attempts_of(lines: Sequence[dict[str, Any]], *, count_lost: bool = True) -> list[Attempt]:
    """What the lines of one process come to.

    Seconds of steps behind the one that a later life, or the same after a rollback, went on from are `lost`, with the
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
    """What the steps after `first` up to `last` took, between two lines of a life."""

    attempt: Attempt
    first: int
    last: int
    seconds: dict[str, float]
    # The life ended with it, and with no step that was only begun.
    is_final: bool

    def mark_lost(self, fraction: float) -> None:
        for name, seconds in self.seconds.items():
            self.attempt.seconds[name] -= fraction * seconds
            self.attempt.seconds['lost'] += fraction * seconds


def _make_attempt(lines: Sequence[dict[str, Any]], previous_end: float) -> Attempt:
    """From its lines, and the time of the last line before them."""
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
    """What a line has under a category; KeyError where it should have it and has not."""
    seconds = line['seconds']
    return float(seconds.get(name, 0.0) if name in ADDED_LATER else seconds[name])


def _make_interval(attempt: Attempt, before: dict[str, Any], line: dict[str, Any]) -> _Interval:
    first = before['step'] if before['step'] is not None else attempt.start_step or 0
    seconds = {name: seconds_of(line, name) - before['seconds'].get(name, 0.0) for name in STEP_CATEGORIES}
    # The line of a rollback has the step that it goes back to.
    return _Interval(attempt, first, max(first, line['step']), seconds, line['why'] == 'end')


def _mark_lost_after(intervals: list[_Interval], step: int) -> None:
    """The run goes on from an older step: what was done behind it is lost."""
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
    """Those that must stay for `attempts_of` to come to the same: the last of each life, and those of saves."""
    remaining = []
    for _, group in itertools.groupby(lines, key=lambda line: line['life']):
        own = list(group)
        remaining += [line for line in own[:-1] if line.get('why') in _PERMANENT]
        remaining.append(own[-1])
    return remaining
