"""Prints the durations of the test suite: `launch/test.sh --times`, or `python -m benchmarks.test_time REPORT`.

`pytest --time-report=REPORT` writes the report. The table has one row per test file, sorted by duration. Its columns
are the seconds of imports, XLA compilation, tracing, waiting for child processes, and everything else. --save writes
the durations to `tests/durations.json`; --fast adds the tests that are slow in a report of the fast tier.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.step import machine
from tools.durations import Durations

CATEGORIES = ('import', 'compile', 'trace', 'process', 'run')
RESULTS = Path(__file__).parent / 'results' / 'tests_cpu2.json'


def table(report: dict[str, Any], rows: int) -> str:
    """Returns a table of the slowest files of a report with totals, in seconds."""
    header = ('seconds', *CATEGORIES, 'CPU', 'tests', 'programs')
    lines = [''.join(f'{name:>9}' for name in header) + '  file']
    files = report['files']
    total = {name: sum(file.get(name, 0) for file in files.values()) for name in (*_KEYS, 'import')}
    longest = sorted(files.items(), key=lambda item: -item[1]['seconds'])[:rows]
    for name, file in [*longest, (f'{len(files)} files', total)]:
        figures = ''.join(f'{file.get(key, 0):9.1f}' for key in _KEYS[:-2])
        lines.append(f'{figures}{file["tests"]:9.0f}{file.get("programs", 0):9.0f}  {name}')
    slow = Durations.of_report(report).slow
    lines.append(
        f'{len(report["tests"])} tests, {len(slow)} of them slow, in {report["seconds"]:.0f} s; '
        f'peak memory of a worker {max(report["peak_gib"]):.1f} GiB'
    )
    return '\n'.join(lines)


_KEYS = ('seconds', *CATEGORIES, 'cpu', 'tests', 'programs')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('report', type=Path, help='file that --time-report wrote')
    parser.add_argument('--rows', type=int, default=30, help='number of files to show')
    parser.add_argument('--fast', type=Path, help='report of the fast tier alone')
    parser.add_argument('--save', action='store_true', help='write tests/durations.json and the result')
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    print(table(report, options.rows))
    if options.save:
        durations = Durations.of_report(report)
        if options.fast:
            fast = json.loads(options.fast.read_text())
            durations = durations.with_slow_of(Durations.of_report(fast))
            print(f'fast tier: {len(fast["tests"])} tests in {fast["seconds"]:.0f} s')
        durations.save()
        summary = {key: value for key, value in report.items() if key != 'tests'}
        RESULTS.write_text(json.dumps({'machine': machine(), **summary}, indent=1) + '\n')


if __name__ == '__main__':
    main()
