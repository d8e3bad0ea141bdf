"""Shows runs on a terminal: `maxlm monitor WORKDIR… [--once] [--interval=SECONDS]`.

Shows state, progress, time and money spent and remaining, loss, throughput, goodput, devices and events. The workdirs
may be in buckets, gs://… or s3://…. Keys: q quits, r reads immediately, Tab selects another run. With --once, or if the
output is not a terminal, everything is printed once. Exit codes: 0 done; 2 bad input.
"""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console

from maxlm.cli.hints import print_next
from maxlm.cli.parser import ArgumentParser, command_parser, number
from maxlm.cli.process import run
from maxlm.errors import EXIT_DONE
from maxlm.monitoring.live import show_once, watch
from maxlm.telemetry.run_history import HistoryReader

# Width if the output is not a terminal and COLUMNS is not set.
PIPED_WIDTH = 100


def main(argv: list[str]) -> int:
    """Parses the command line and shows the runs."""
    options = make_parser().parse_args(argv)
    console = _console()
    readers = [HistoryReader(workdir) for workdir in options.workdirs]
    if options.once or not console.is_terminal or console.is_dumb_terminal:
        show_once(readers, console, now=time.time())
        print_next('maxlm', 'report', *options.workdirs)
    else:
        watch(readers, interval=options.interval, console=console)
    return EXIT_DONE


def make_parser() -> ArgumentParser:
    parser = command_parser('monitor', __doc__, 'runs/a', 'runs/a gs://bucket/runs/b --once')
    parser.add_shared('workdirs')
    parser.add_argument('--once', action='store_true', help='print the runs once and exit')
    parser.add_argument(
        '--interval',
        type=number(0.1, 86400, float),
        default=2.0,
        metavar='SECONDS',
        help='seconds between two reads of the workdirs (%(default)s)',
    )
    return parser


def _console() -> Console:
    if hasattr(sys.stdout, 'reconfigure'):
        # Replace characters that the terminal's encoding does not support.
        sys.stdout.reconfigure(errors='replace')
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and 'COLUMNS' not in os.environ:
        console = Console(highlight=False, markup=False, emoji=False, width=PIPED_WIDTH)
    return console


if __name__ == '__main__':
    run('monitor')
