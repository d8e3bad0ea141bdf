"""Trains a model: `python -m maxlm.train --config=FILE[:variant] [--workdir=DIR] [--config.section.key=value …]`.

The default workdir is runs/NAME or runs/NAME-VARIANT, where NAME is the name of the config file. To resume a run, run
the same command again: it continues from the newest checkpoint of the workdir. The workdir may be a bucket (gs://…,
s3://…). --resume=WORKDIR[@STEP] continues from a checkpoint of another workdir.

Exit codes: 0 done; 1 the loss or the gradients are not finite, or spike, despite rollbacks; 2 bad input; 75 preempted
(SIGTERM, Ctrl-C or a maintenance event), or a bucket does not respond: run the same command again. If one of several
processes (see `maxlm.runtime.initialize`) is lost or hangs, all processes exit with 75.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from maxlm.errors import exit_on_sigterm

if __name__ == '__main__':
    # Must precede the other imports, which take seconds.
    exit_on_sigterm(importing=True)

import jax

from maxlm.config.config_files import default_workdir
from maxlm.config.loading import load, split_overrides
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED, ArgumentParser, exit_code
from maxlm.hints import print_next
from maxlm.runtime.heartbeat import Heartbeats, disconnect
from maxlm.runtime.initialize import initialize
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.runtime.preemption import ignore_sigterm
from maxlm.runtime.rendezvous import RendezvousError
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.telemetry.timeline import Timeline, process_start_time
from maxlm.trainer.batch_source import open_text
from maxlm.trainer.run import OpenSource, WorkdirUnavailableError
from maxlm.trainer.run import run as run_training
from maxlm.workdir.files import CHAT_TEMPLATE


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains on prepared data; `began` as in `train`."""
    return train(
        argv,
        open_text,
        prog='maxlm train',
        description=__doc__,
        example='--config=configs/tiny.py --workdir=runs/first',
        began=began,
    )


def train(
    argv: list[str],
    open_source: OpenSource,
    *,
    prog: str,
    description: str | None,
    example: str,
    began: float | None,
) -> int:
    """Parses the command line of a training command and trains. Returns the exit code.

    Args:
        argv: arguments of the command.
        open_source: opens the batch source.
        prog: name of the command.
        description: description of the command for `--help`.
        example: arguments of an example for `--help`.
        began: start time of the process in seconds since 1970, because startup time also costs money; None means now.
    """
    timeline = Timeline(began)
    overrides, rest = split_overrides(argv)
    options = _parser(prog, description, example).parse_args(rest)
    try:
        initialize()
    except RendezvousError as error:
        error.exit_process()
    with Heartbeats() as heartbeats, timeline.track_compilation():
        config = load(options.config, overrides)
        if not options.workdir:
            options.workdir = default_workdir(options.config)
            if jax.process_index() == 0:
                print(f'workdir: {options.workdir} (choose another with --workdir)', flush=True)
        try:
            code = run_training(
                config,
                open_source,
                workdir=options.workdir,
                resume=options.resume,
                heartbeats=heartbeats,
                timeline=timeline,
            )
        except WorkdirUnavailableError as error:
            print(f'error: {error}', file=sys.stderr)
            if jax.process_count() > 1:
                heartbeats.exit_all(EXIT_PREEMPTED, str(error))
            return EXIT_PREEMPTED
        if code == EXIT_DONE and jax.process_index() == 0:
            # A URL is not read again for a hint.
            chat = ['--chat'] if (Path(options.workdir) / CHAT_TEMPLATE).is_file() else []
            print_next('maxlm', 'generate', f'--checkpoint={options.workdir}', *chat, '--prompt=Hello')
        return code


def _parser(prog: str, description: str | None, example: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description=description,
        epilog=f'example: python -m {prog} {example}',
    )
    parser.add_argument(
        '--config',
        type=PathOption(Kind.FILE),
        required=True,
        help='config file, optionally with a variant (configs/x.py, configs/x.py:big), or a config.json',
    )
    parser.add_argument(
        '--workdir',
        type=PathOption(Kind.DIRECTORY, ANY),
        help='directory or URL of the run, created if missing; default: runs/NAME or runs/NAME-VARIANT of the config',
    )
    parser.add_argument(
        '--resume',
        type=PathOption(Kind.DIRECTORY, ANY, may_be_empty=True),
        default='',
        metavar='WORKDIR[@STEP]',
        help='checkpoint that a new run resumes from, with its state, history and data position; directory or URL',
    )
    return parser


def start(command: Callable[..., int]) -> NoReturn:
    """Runs a training command and exits the process with its exit code."""
    # It affects the entire process and must be called before JAX starts.
    disable_malloc_trim()
    exit_on_sigterm(importing=False)
    code = exit_code(partial(command, began=process_start_time()), sys.argv[1:])
    if code in (EXIT_DONE, EXIT_PREEMPTED):
        ignore_sigterm()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    disconnect(code)
    sys.exit(code)


def run() -> None:
    """Entry point of `python -m maxlm.train` and `maxlm train`."""
    start(main)


if __name__ == '__main__':
    run()
