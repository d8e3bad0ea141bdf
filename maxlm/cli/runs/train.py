"""Trains a model: `maxlm train --config=FILE[:variant] [--workdir=DIR] [--config.section.key=value …]`.

The default workdir is runs/NAME or runs/NAME-VARIANT, where NAME is the name of the config file. To resume a run, run
the same command again: it continues from the newest checkpoint of the workdir. The workdir may be a bucket (gs://…,
s3://…). --resume=WORKDIR[@STEP] continues from a checkpoint of another workdir.

Exit codes: 0 done; 1 the loss or the gradients are not finite, or spike, despite rollbacks; 2 bad input; 75 preempted
(SIGTERM, Ctrl-C, a closed terminal or a maintenance event), or a bucket does not respond: run the same command again.
If one of several processes (see `maxlm.runtime.initialize`) is lost or hangs, all processes exit with 75.
"""

from __future__ import annotations

from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.config.config_files import split_overrides
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains on prepared data; `began` as in `execute`."""
    overrides, rest = split_overrides(argv)
    options = make_parser().parse_args(rest)

    from maxlm.cli.execution.train import execute
    from maxlm.trainer.batch_source import open_text

    return execute(options, overrides, open_text, began=began)


def make_parser() -> ArgumentParser:
    parser = command_parser('train', __doc__, '--config=configs/tiny.py --workdir=runs/first')
    add_arguments(parser)
    return parser


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options of a training command."""
    parser.add_shared('--config')
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
    parser.add_argument(
        '--gcs-credentials',
        type=PathOption(Kind.FILE),
        metavar='FILE',
        help='key file of a service account for gs:// URLs; default: GOOGLE_APPLICATION_CREDENTIALS, or the account of '
        'the machine. Its content is never logged or recorded',
    )
    parser.add_argument(
        '--dry-run',
        nargs='?',
        const='here',
        choices=('here', 'elsewhere'),
        help='only check the config and its inputs, and write nothing. elsewhere: for machines that get the files of '
        'this repository, but not those that git ignores',
    )


if __name__ == '__main__':
    run('train')
