"""Tables that compare checkpoints, with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxlm.evaluation.statistics import Z_95, Measure, difference

LARGE = 1e5
# Minimum number of decimals. Numbers that need more than the maximum are written with an exponent.
MIN_DECIMALS, MAX_DECIMALS = 4, 9
# Numbers below this fraction of the largest number in a cell are treated as rounding errors.
ROUNDING = 1e-9
LEGEND = (
    '±: half-width of the 95 % interval, 1.96 standard errors (lm-eval prints one standard error). '
    '[ ]: 95 % interval of a difference; *: excludes 0.'
)


class Column(NamedTuple):
    """A checkpoint and its measures."""

    name: str
    measures: Sequence[Measure]

    def find(self, name: str) -> Measure | None:
        """Returns the measure with a name, or None."""
        return next((measure for measure in self.measures if measure.name == name), None)


def table_text(columns: Sequence[Column]) -> str:
    """Formats a text table: one row per metric, all checkpoints, their differences from the first, and a legend."""
    first, *others = columns
    header = ['', *(column.name for column in columns), *(f'{column.name} − {first.name}' for column in others)]
    rows = [header]
    for name in _names(columns):
        row_measures = [column.find(name) for column in columns]
        rows.append(
            [
                name,
                *map(_cell, row_measures),
                *(_difference_cell(change) for change in _differences(row_measures[0], row_measures[1:])),
            ]
        )
    widths = [max(len(row[column_index]) for row in rows) for column_index in range(len(header))]
    lines = (
        '  '.join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
    return '\n'.join([*(line.rstrip() for line in lines), LEGEND])


def table_json(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Returns one object per metric, with `value`, `standard_error`, `interval` and differences of each checkpoint."""
    rows = []
    for name in _names(columns):
        row_measures = [column.find(name) for column in columns]
        changes = [None, *_differences(row_measures[0], row_measures[1:])]
        cells = [
            {
                'checkpoint': column.name,
                'value': measure and measure.value,
                'standard_error': measure and measure.error,
                'interval': measure and measure.interval,
                'difference': change and change.value,
                'difference_interval': change and change.interval,
            }
            for column, measure, change in zip(columns, row_measures, changes, strict=True)
        ]
        rows.append({'name': name, 'checkpoints': cells})
    return rows


def _names(columns: Sequence[Column]) -> list[str]:
    return list(dict.fromkeys(measure.name for column in columns for measure in column.measures))


def _differences(first: Measure | None, others: Sequence[Measure | None]) -> list[Measure | None]:
    return [difference(first, other) if first and other else None for other in others]


def _cell(measure: Measure | None) -> str:
    if measure is None:
        return '–'
    if measure.error is None:
        return _format_numbers(measure.value)[0]
    return ' ± '.join(_format_numbers(measure.value, Z_95 * measure.error))


def _difference_cell(change: Measure | None) -> str:
    if change is None:
        return '–'
    if change.interval is None:
        return _format_numbers(change.value, sign='+')[0]
    low, high = change.interval
    text, *bounds = _format_numbers(change.value, low, high, sign='+')
    return f'{text} [{", ".join(bounds)}]{"*" if low > 0 or high < 0 else " "}'


def _format_numbers(*numbers: float, sign: str = '-') -> list[str]:
    """Formats numbers with the same decimals, at least two significant digits each. Large numbers get an exponent."""
    # Differences that cancel leave rounding errors such as 1e-17, which count as 0.
    largest = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
    sizes = [abs(number) for number in numbers if math.isfinite(number) and abs(number) > ROUNDING * largest]
    decimals = max((1 - math.floor(math.log10(size)) for size in sizes), default=0)
    decimals = max(decimals, MIN_DECIMALS)
    return [
        # Adding 0.0 converts -0.0 to 0.0.
        f'{number + 0.0:{sign}.{decimals}f}'
        if decimals <= MAX_DECIMALS and abs(number) < LARGE
        else f'{number + 0.0:{sign}.3e}'
        for number in numbers
    ]
