"""Several checkpoints in one table, with 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from maxlm.evaluation.measures import DEVIATIONS, Measure, difference

LARGE = 1e5


class Column(NamedTuple):
    """One checkpoint and what was measured of it."""

    name: str
    measures: Sequence[Measure]

    def find(self, name: str) -> Measure | None:
        """The measure of that name."""
        return next((measure for measure in self.measures if measure.name == name), None)


def table_text(columns: Sequence[Column]) -> str:
    """Lines for people: what, each checkpoint, and what the others differ from the first by.

    A difference whose interval does not hold 0 has a star.
    """
    first, *others = columns
    header = ['', *(column.name for column in columns), *(f'{column.name} − {first.name}' for column in others)]
    rows = [header]
    for name in _names(columns):
        found = [column.find(name) for column in columns]
        rows.append(
            [name, *map(_told, found), *(_told_difference(change) for change in _differences(found[0], found[1:]))]
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(header))]
    lines = (
        '  '.join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
    return '\n'.join(line.rstrip() for line in lines)


def table_json(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """The same as objects: `name`, and for each checkpoint `value`, `interval`, `difference`, `difference_interval`."""
    rows = []
    for name in _names(columns):
        found = [column.find(name) for column in columns]
        changes = [None, *_differences(found[0], found[1:])]
        cells = [
            {
                'checkpoint': column.name,
                'value': measure and measure.value,
                'interval': measure and measure.interval,
                'difference': change and change.value,
                'difference_interval': change and change.interval,
            }
            for column, measure, change in zip(columns, found, changes, strict=True)
        ]
        rows.append({'name': name, 'checkpoints': cells})
    return rows


def _names(columns: Sequence[Column]) -> list[str]:
    return list(dict.fromkeys(measure.name for column in columns for measure in column.measures))


def _differences(first: Measure | None, others: Sequence[Measure | None]) -> list[Measure | None]:
    return [difference(first, other) if first and other else None for other in others]


def _told(measure: Measure | None) -> str:
    if measure is None:
        return '–'
    return _short(measure.value) + ('' if measure.error is None else f' ± {_short(DEVIATIONS * measure.error)}')


def _told_difference(change: Measure | None) -> str:
    if change is None:
        return '–'
    told, interval = _short(change.value, '+'), change.interval
    if interval is None:
        return told
    star = '*' if interval[0] > 0 or interval[1] < 0 else ' '
    low, high = (_short(bound, '+') for bound in interval)
    return f'{told} [{low}, {high}]{star}'


def _short(value: float, sign: str = '-') -> str:
    """With four decimals; perplexities of bad models have many digits before them."""
    return f'{value:{sign}.4f}' if abs(value) < LARGE else f'{value:{sign}.3e}'
