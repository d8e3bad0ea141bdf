"""Watch runs on a terminal: `python -m maxlm.monitor WORKDIR… [--once] [--interval=SECONDS]`.

State, progress, time and money spent and left, loss, speed, where the time goes, devices, and what has happened. The
workdirs may be in buckets, gs://… or s3://…. Keys: q quits, r reads at once, Tab shows another run. With --once, or
where the output is no terminal, all of it is printed once. Exit codes: 0; 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from rich.console import Console

from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code
from maxlm.monitoring.live import show_once, watch
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.telemetry.run_history import HistoryReader

# Of output that is no terminal, unless COLUMNS says otherwise.
PIPED_WIDTH = 100


def main(argv: list[str]) -> int:
    """Reads the command line, and shows the runs."""
    parser = ArgumentParser(
        prog='maxlm.monitor',
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        'workdirs',
        nargs='+',
        type=PathOption(Kind.DIRECTORY, ANY),
        metavar='WORKDIR',
        help='directory or URL of a run',
    )
    parser.add_argument('--once', action='store_true', help='print the runs and end')
    parser.add_argument(
        '--interval', type=float, default=2.0, metavar='SECONDS', help='between two looks (%(default)s)'
    )
    options = parser.parse_args(argv)
    if not 0.1 <= options.interval <= 86400:
        raise InputError(f'--interval={options.interval:g}: give seconds, from 0.1 to 86400')
    console = _console()
    readers = [HistoryReader(workdir) for workdir in options.workdirs]
    if options.once or not console.is_terminal or console.is_dumb_terminal:
        show_once(readers, console, now=time.time())
    else:
        watch(readers, interval=options.interval, console=console)
    return EXIT_DONE


def run() -> None:
    """Entry of `python -m maxlm.monitor` and `maxlm monitor`."""
    sys.exit(exit_code(main, sys.argv[1:]))


def _console() -> Console:
    if hasattr(sys.stdout, 'reconfigure'):
        # A terminal of another alphabet shows what it can.
        sys.stdout.reconfigure(errors='replace')
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and 'COLUMNS' not in os.environ:
        console = Console(highlight=False, markup=False, emoji=False, width=PIPED_WIDTH)
    return console


if __name__ == '__main__':
    run()
