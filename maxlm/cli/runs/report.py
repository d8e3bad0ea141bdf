"""Writes the report of a run as a self-contained HTML page: model and data, curves, time, cost.

    maxlm report WORKDIR… [--output FILE]

The page of one run is WORKDIR/report.html. It shows the results that `maxlm evaluate --output=WORKDIR/evaluation`
wrote, and CORE and bits per byte are also printed. Several runs are compared on one page, compare.html in the current
directory. WORKDIR may be a URL (gs://…, s3://…), which requires --output. An existing file is replaced only if it is a
maxlm report. Append #dark or #light to the address of a page to set its colors.
"""

from __future__ import annotations

from pathlib import Path

from maxlm.cli.hints import print_next
from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.errors import EXIT_DONE, InputError, explain_os_errors
from maxlm.formatting import format_bytes
from maxlm.reporting.page import COMPARISON, NAME, is_foreign, write_page
from maxlm.reporting.records import evaluation_text
from maxlm.storage.filesystem import display_path, is_url
from maxlm.storage.paths import Kind, PathOption
from maxlm.telemetry.run_history import read_history


def main(argv: list[str]) -> int:
    """Writes the page and prints its path."""
    options = make_parser().parse_args(argv)
    first = options.workdirs[0]
    is_single = len(options.workdirs) == 1
    if is_single and options.output is None and is_url(first):
        raise InputError(f'{display_path(first)}: the page cannot be written to a URL; set --output=FILE')
    path = options.output or (Path(first) / NAME if is_single else Path(COMPARISON))
    histories = [read_history(workdir) for workdir in options.workdirs]
    if is_single and options.output is None and not histories[0].has_started:
        print(f'{first}: no run has started, so no page was written')
        return EXIT_DONE
    with explain_os_errors(path, 'choose a writable --output=FILE'):
        if is_foreign(path):
            raise InputError(
                f'{path}: file already exists and is not a page of maxlm report; choose another --output=FILE'
            )
        write_page(path, histories)
    for history in histories:
        for note in history.notes:
            print(f'{history.workdir}: {note}')
        for line in evaluation_text(history):
            print(line)
    print(f'{path}: {format_bytes(path.stat().st_size)}')
    print_next('python', '-m', 'webbrowser', str(path))
    return EXIT_DONE


def make_parser() -> ArgumentParser:
    parser = command_parser('report', __doc__, 'runs/a', 'runs/a gs://bucket/runs/b --output=compare.html')
    parser.add_shared('workdirs', help='workdir or URL of a run; several are compared')
    parser.add_argument(
        '--output',
        type=PathOption(Kind.FILE, as_path=True),
        metavar='FILE',
        help=f'HTML page to write (default: WORKDIR/{NAME}; ./{COMPARISON} for several runs)',
    )
    return parser


if __name__ == '__main__':
    run('report')
