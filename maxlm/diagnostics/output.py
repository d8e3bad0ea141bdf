"""Output of results: a table, JSON, or lines where there is no terminal library."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from maxlm.diagnostics.result import ORDER, CheckStatus
from maxlm.diagnostics.runner import Result


def plural(count: int, noun: str) -> str:
    """`1 device`, `2 devices`."""
    return f'{count:,} {noun}{"" if count == 1 else "s"}'


COLORS = {
    CheckStatus.OK: 'green',
    CheckStatus.WARNING: 'yellow',
    CheckStatus.FAILURE: 'bold red',
    CheckStatus.SKIPPED: 'dim',
}
# Width where the terminal's is not known, and largest width.
WIDTH, MAX_WIDTH = 80, 120


def worst_status(results: Sequence[Result]) -> CheckStatus:
    """The worst of all; checks that were skipped say nothing."""
    return max((result.finding.status for result in results), key=ORDER.index, default=CheckStatus.SKIPPED)


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """The results with plain names; `status` is that of the machine."""
    return {
        'status': worst_status(results).value,
        'checks': [
            {
                'name': result.name,
                'status': result.finding.status.value,
                'found': result.finding.message,
                'remedy': result.finding.remedy,
                'seconds': round(result.seconds, 3),
            }
            for result in results
        ],
    }


def print_results(results: Sequence[Result]) -> None:
    """Prints a table, and below it one line that sums it up."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        # That it is missing stands among the results.
        print('\n'.join(as_lines(results)))
    else:
        console = Console(highlight=False, soft_wrap=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=WIDTH)
        elif console.width > MAX_WIDTH:
            console = Console(highlight=False, width=MAX_WIDTH)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow='fold')
        for result in results:
            finding, color = result.finding, COLORS[result.finding.status]
            text = Text(finding.message, style='dim' if finding.status is CheckStatus.SKIPPED else '')
            if finding.remedy:
                text.append(f'\n→ {finding.remedy}', style=color)
            table.add_row(Text(finding.status.value, style=color), Text(result.name, style='bold'), text)
        with console.capture() as captured:
            console.print(table)
        # It fills every line to the end of the terminal.
        print('\n'.join(line.rstrip() for line in captured.get().splitlines()))
    print(f'\n{summary(results)}')


def as_lines(results: Sequence[Result]) -> list[str]:
    """A line for each finding, and one for each remedy."""
    lines = []
    for result in results:
        lines.append(f'{result.finding.status.value:<7}  {result.name:<11}  {result.finding.message}')
        if result.finding.remedy:
            lines.append(f'{"":<22}→ {result.finding.remedy}')
    return lines


def summary(results: Sequence[Result]) -> str:
    """The whole in one line."""
    counts = Counter(result.finding.status for result in results)
    parts = [f'{counts[CheckStatus.OK]} ok']
    parts += [
        plural(counts[status], status.value) for status in (CheckStatus.WARNING, CheckStatus.FAILURE) if counts[status]
    ]
    parts += [f'{counts[CheckStatus.SKIPPED]} skipped'] if counts[CheckStatus.SKIPPED] else []
    failed = [result.name for result in results if result.finding.status is CheckStatus.FAILURE]
    return ', '.join(parts) + (f'; not fit for the run: {", ".join(failed)}' if failed else '')


@contextlib.contextmanager
def progress(*, is_shown: bool) -> Iterator[Any]:
    """Yields a function that shows the current check on stderr, on a terminal."""
    if not is_shown or not sys.stderr.isatty():
        yield lambda line: None
        return
    try:
        from rich.console import Console
    except ImportError:
        yield lambda line: None
        return
    with Console(stderr=True).status('') as status:
        yield status.update
