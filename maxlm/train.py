"""Trains a model: `python -m maxlm.train --config=FILE[:variant] [--workdir=DIR] [--config.section.key=value …]`.

The default workdir is runs/NAME or runs/NAME-VARIANT, where NAME is the name of the config file. To resume a run, run
the same command again: it continues from the newest checkpoint of the workdir. The workdir may be a bucket (gs://…,
s3://…). --resume=WORKDIR[@STEP] continues from a checkpoint of another workdir.

Exit codes: 0 done; 1 the loss or the gradients are not finite, or spike, despite rollbacks; 2 bad input; 75 preempted
(SIGTERM, Ctrl-C, a closed terminal or a maintenance event), or a bucket does not respond: run the same command again.
If one of several processes (see `maxlm.runtime.initialize`) is lost or hangs, all processes exit with 75.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from maxlm.config.config_files import split_overrides
from maxlm.errors import ArgumentParser, run_command
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.telemetry.timeline import process_start_time


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains on prepared data; `began` as in `execute`."""
    options, overrides = parse(
        argv, prog='maxlm train', description=__doc__, example='--config=configs/tiny.py --workdir=runs/first'
    )

    from maxlm.commands.train import execute
    from maxlm.trainer.batch_source import open_text

    return execute(options, overrides, open_text, began=began)


def parse(argv: list[str], *, prog: str, description: str | None, example: str) -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line of a training command.

    Args:
        argv: arguments of the command.
        prog: name of the command.
        description: description of the command for `--help`.
        example: arguments of an example for `--help`.

    Returns:
        The options, and the overrides of the config.
    """
    overrides, rest = split_overrides(argv)
    return _parser(prog, description, example).parse_args(rest), overrides


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
    disable_malloc_trim()
    # Garbage collection takes an eighth of the time of imports and finds nothing. `execute` enables it again.
    gc.disable()
    code = run_command(partial(command, began=process_start_time()), output_is_optional=True)
    # After an invalid argument, JAX is not imported.
    if 'jax' in sys.modules:
        from maxlm.runtime.heartbeat import disconnect

        disconnect(code)
    sys.exit(code)


def run() -> None:
    """Entry point of `python -m maxlm.train` and `maxlm train`."""
    start(main)


if __name__ == '__main__':
    run()
