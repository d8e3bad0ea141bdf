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
LIVE = ('start', 'compile', 'restore', 'step', 'rollout', 'data_wait', 'evaluation', 'checkpoint', 'other')
# Those that a line does not have that was written before there was such a thing.
YOUNGER = ('rollout',)
# Without which no model would come about.
OF_USE = ('step', 'rollout')
# Steps that were done again; nothing ran between two lives.
CATEGORIES = (*LIVE, 'lost', 'idle')
# What is lost with a step.
OF_STEPS = ('step', 'rollout', 'data_wait', 'evaluation')
# Lines that stay when a file is made shorter, besides the last one of each life.
_LASTING = ('saved', 'rollback')


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
    began: float
    time: float
    start_step: int | None
    step: int | None
    saved_step: int | None
    seconds: dict[str, float]
    dollars: float | None
    closed: bool


class GoodputLog(NamedTuple):
    """The lives of one process of a run, oldest first, and what of its file could not be read."""

    lives: list[Attempt]
    notes: list[str]

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by category over all lives."""
        return {name: sum(life.seconds[name] for life in self.lives) for name in CATEGORIES}

    @property
    def seconds(self) -> float:
        """From the beginning of the first life to the last line of the last."""
        return sum(self.totals.values())

    @property
    def share(self) -> float:
        """Seconds of steps that count, rollouts included, as a share of all; 0 of a run without lines."""
        return sum(self.totals[name] for name in OF_USE) / self.seconds if self.lives else 0.0

    @property
    def dollars(self) -> float | None:
        """Of all lives whose price is known; None where no price is."""
        known = [life.dollars for life in self.lives if life.dollars is not None]
        return sum(known) if known else None


def read_goodput(workdir: Path, process: int = 0, *, count_lost: bool = True) -> GoodputLog:
    """The ledger of one process; a run's is that of process 0.

    Args:
        workdir: of the run.
        process: its number.
        count_lost: as for `account`.

    Raises:
        InputError: a line that is not the last is not JSON, or is not one of a ledger.
    """
    name = goodput_name(process)
    lines, torn = read_lines(workdir / name)
    try:
        lives = attempts_of(lines, count_lost=count_lost)
    except (KeyError, TypeError) as error:
        raise InputError(f'{workdir / name}: not a ledger that maxlm wrote ({error!r}); move it elsewhere') from error
    return GoodputLog(lives, [truncation_note(name)] if torn else [])


def attempts_of(lines: Sequence[dict[str, Any]], *, count_lost: bool = True) -> list[Attempt]:
    """What the lines of one process come to.

    Seconds of steps behind the one that a later life, or the same after a rollback, went on from are `lost`, with the
    waits for their data and the evaluations between them. As a line is written at every save these are known exactly.

    Args:
        lines: oldest first.
        count_lost: without it they stay what they were.
    """
    lives: list[Attempt] = []
    stretches: list[_Stretch] = []
    for _, group in itertools.groupby(lines, key=lambda line: line['life']):
        own = list(group)
        life = _life(own, lives[-1].time if lives else own[0]['began'])
        lives.append(life)
        if count_lost and life.start_step is not None:
            _go_back(stretches, life.start_step)
        for before, line in itertools.pairwise([{'step': life.start_step, 'seconds': {}}, *own]):
            if line['step'] is None:
                continue
            stretches.append(_stretch(life, before, line))
            if count_lost and line['why'] == 'rollback':
                _go_back(stretches, line['step'])
    return lives


@dataclasses.dataclass
class _Stretch:
    """What the steps after `first` up to `last` took, between two lines of a life."""

    life: Attempt
    first: int
    last: int
    seconds: dict[str, float]
    # The life ended with it, and with no step that was only begun.
    final: bool

    def lose(self, share: float) -> None:
        for name, seconds in self.seconds.items():
            self.life.seconds[name] -= share * seconds
            self.life.seconds['lost'] += share * seconds


def _life(own: Sequence[dict[str, Any]], ended: float) -> Attempt:
    """From its lines, and the time of the last line before them."""
    began, last = own[0]['began'], own[-1]
    seconds = {name: seconds_of(last, name) for name in LIVE}
    # Clocks of two machines differ.
    seconds |= {'lost': 0.0, 'idle': max(0.0, began - ended)}
    return Attempt(
        number=last['life'],
        host=last['host'],
        began=began,
        time=last['time'],
        start_step=last['start_step'],
        step=last['step'],
        saved_step=last['saved_step'],
        seconds=seconds,
        dollars=last['dollars'],
        closed=last['why'] == 'end',
    )


def seconds_of(line: dict[str, Any], name: str) -> float:
    """What a line has under a category; KeyError where it should have it and has not."""
    seconds = line['seconds']
    return float(seconds.get(name, 0.0) if name in YOUNGER else seconds[name])


def _stretch(life: Attempt, before: dict[str, Any], line: dict[str, Any]) -> _Stretch:
    first = before['step'] if before['step'] is not None else life.start_step or 0
    seconds = {name: seconds_of(line, name) - before['seconds'].get(name, 0.0) for name in OF_STEPS}
    # The line of a rollback has the step that it goes back to.
    return _Stretch(life, first, max(first, line['step']), seconds, line['why'] == 'end')


def _go_back(stretches: list[_Stretch], step: int) -> None:
    """The run goes on from an older step: what was done behind it is lost."""
    while stretches:
        newest = stretches[-1]
        begun_only = newest.first == newest.last == step and not newest.final
        if newest.last <= step and not begun_only:
            return
        if newest.first < step:
            # No line tells when it was done.
            newest.lose((newest.last - step) / (newest.last - newest.first))
            newest.last = step
            return
        newest.lose(1.0)
        stretches.pop()


def shorter(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that must stay for `account` to come to the same: the last of each life, and those of saves."""
    kept = []
    for _, group in itertools.groupby(lines, key=lambda line: line['life']):
        own = list(group)
        kept += [line for line in own[:-1] if line.get('why') in _LASTING]
        kept.append(own[-1])
    return kept
