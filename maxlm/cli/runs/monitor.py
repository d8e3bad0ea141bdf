"""Shows runs on a terminal: `python -m maxlm.monitor WORKDIR… [--once] [--interval=SECONDS]`.

Shows state, progress, time and money spent and remaining, loss, throughput, goodput, devices and events. The workdirs
may be in buckets, gs://… or s3://…. Keys: q quits, r reads immediately, Tab selects another run. With --once, or if the
output is not a terminal, everything is printed once. Exit codes: 0 done; 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from rich.console import Console

from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, run_command
from maxlm.hints import print_next
from maxlm.monitoring.live import show_once, watch
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.telemetry.run_history import HistoryReader

# Width if the output is not a terminal and COLUMNS is not set.
PIPED_WIDTH = 100


def main(argv: list[str]) -> int:
    """Parses the command line and shows the runs."""
    parser = ArgumentParser(
        prog='maxlm monitor',
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='examples:\n  maxlm monitor runs/a\n  maxlm monitor runs/a gs://bucket/runs/b --once',
    )
    parser.add_argument(
        'workdirs',
        nargs='+',
        type=PathOption(Kind.DIRECTORY, ANY),
        metavar='WORKDIR',
        help='workdir or URL of a run',
    )
    parser.add_argument('--once', action='store_true', help='print the runs once and exit')
    parser.add_argument(
        '--interval',
        type=float,
        default=2.0,
        metavar='SECONDS',
        help='seconds between two reads of the workdirs (%(default)s)',
    )
    options = parser.parse_args(argv)
    if not 0.1 <= options.interval <= 86400:
        raise InputError(f'--interval={options.interval:g}: must be from 0.1 to 86400 seconds')
    console = _console()
    readers = [HistoryReader(workdir) for workdir in options.workdirs]
    if options.once or not console.is_terminal or console.is_dumb_terminal:
        show_once(readers, console, now=time.time())
        print_next('maxlm', 'report', *options.workdirs)
    else:
        watch(readers, interval=options.interval, console=console)
    return EXIT_DONE


def run() -> None:
    """Entry point of `python -m maxlm.monitor` and `maxlm monitor`."""
    sys.exit(run_command(main))


def _console() -> Console:
    if hasattr(sys.stdout, 'reconfigure'):
        # Replace characters that the terminal's encoding does not support.
        sys.stdout.reconfigure(errors='replace')
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and 'COLUMNS' not in os.environ:
        console = Console(highlight=False, markup=False, emoji=False, width=PIPED_WIDTH)
    return console


if __name__ == '__main__':
    run()
