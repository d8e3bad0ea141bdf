"""Prints results as a table, as JSON, or as plain lines if rich is not installed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxlm.diagnostics.result import ORDER, CheckStatus
from maxlm.diagnostics.runner import Result
from maxlm.formatting import plural

# Minimum time between two lines about the current check.
LINE_SECONDS = 10.0


COLORS = {
    CheckStatus.OK: 'green',
    CheckStatus.WARNING: 'yellow',
    CheckStatus.FAILURE: 'bold red',
    CheckStatus.SKIPPED: 'dim',
}
# Width if there is no terminal, and maximum width.
WIDTH, MAX_WIDTH = 80, 120


def worst_status(results: Sequence[Result]) -> CheckStatus:
    """Returns the worst status. Skipped checks are ignored."""
    return max((result.finding.status for result in results), key=ORDER.index, default=CheckStatus.SKIPPED)


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Returns the results as a JSON-serializable dictionary; `status` is the worst status."""
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
    """Prints a table, followed by a summary line."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        # One of the checks reports that rich is missing.
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
        # Rich pads each line to the width of the terminal.
        print('\n'.join(line.rstrip() for line in captured.get().splitlines()))
    print(f'\n{summary(results)}')


def as_lines(results: Sequence[Result]) -> list[str]:
    """Formats a line per result, and a line per remedy."""
    lines = []
    for result in results:
        lines.append(f'{result.finding.status.value:<7}  {result.name:<11}  {result.finding.message}')
        if result.finding.remedy:
            lines.append(f'{"":<22}→ {result.finding.remedy}')
    return lines


def summary(results: Sequence[Result]) -> str:
    """Summarizes the results in one line."""
    counts = Counter(result.finding.status for result in results)
    parts = [f'{counts[CheckStatus.OK]} ok']
    parts += [
        plural(counts[status], status.value) for status in (CheckStatus.WARNING, CheckStatus.FAILURE) if counts[status]
    ]
    parts += [f'{counts[CheckStatus.SKIPPED]} skipped'] if counts[CheckStatus.SKIPPED] else []
    failed = [result.name for result in results if result.finding.status is CheckStatus.FAILURE]
    return ', '.join(parts) + (f'; not ready for the run: {", ".join(failed)}' if failed else '')


@contextlib.contextmanager
def progress(*, is_shown: bool, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current check on stderr; without a terminal, at most every 10 s."""
    if not is_shown:
        yield lambda line: None
        return
    if not sys.stderr.isatty():
        last = clock()

        def show(line: str) -> None:
            nonlocal last
            if clock() - last >= LINE_SECONDS:
                last = clock()
                print(line, file=sys.stderr, flush=True)

        yield show
        return
    try:
        from rich.console import Console
    except ImportError:
        yield lambda line: None
        return
    with Console(stderr=True).status('') as status:
        yield status.update
