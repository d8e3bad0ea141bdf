"""Stores a teacher's outputs: `python -m maxlm.distill --data=data/a --teacher=runs/a --output=data/a-teacher`.

The teacher runs over all training windows of the data set once. A run with --config.distill.logits_dir=OUTPUT then
learns from its most likely tokens, without running the teacher. To resume, run the same command again.
"""

from __future__ import annotations

import argparse
import sys

from maxlm.errors import ArgumentParser, InputError, run_command
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Writes the outputs of the teacher and prints their size."""
    options = _parser().parse_args(argv)
    for name, lowest in (('top_k', 1), ('seq_len', 2), ('batch_size', 1)):
        if getattr(options, name) < lowest:
            flag = f'--{name.replace("_", "-")}'
            raise InputError(f'{flag}={getattr(options, name)}: must be at least {lowest}')
    if not 0.01 <= options.temperature <= 1000:
        raise InputError(f'--temperature={options.temperature:g}: must be at least 0.01 and at most 1000')

    from maxlm.commands.distill import execute

    return execute(options)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog='maxlm distill',
        allow_abbrev=False,
        description=__doc__,
        epilog='example: python -m maxlm.distill --data=data/mine --teacher=runs/first --top-k=64 --seq-len=256 '
        '--output=data/mine-teacher',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    directory = PathOption(Kind.DIRECTORY)
    parser.add_argument('--data', type=directory, required=True, help='data set of maxlm.prepare')
    parser.add_argument(
        '--teacher',
        type=PathOption(Kind.DIRECTORY, ANY),
        required=True,
        help='checkpoint: workdir, WORKDIR@STEP or directory of one step',
    )
    parser.add_argument('--output', type=directory, required=True, help='directory to create or to complete')
    parser.add_argument('--top-k', type=int, default=64, help='tokens to store for each position (default: 64)')
    parser.add_argument(
        '--seq-len', type=int, default=1024, help='data.seq_len of the later run, in tokens (default: 1024)'
    )
    parser.add_argument(
        '--temperature', type=float, default=1.0, help='distill.temperature of the later run (default: 1)'
    )
    parser.add_argument('--no-document-mask', action='store_true', help='the later run has data.document_mask=False')
    parser.add_argument('--batch-size', type=int, default=16, help='sequences of a forward pass (default: 16)')
    parser.add_argument('--quiet', action='store_true', help='no progress and no next command')
    return parser


def run() -> None:
    """Entry point of `python -m maxlm.distill` and `maxlm distill`."""
    disable_malloc_trim()
    sys.exit(run_command(main, output_is_optional=True))


if __name__ == '__main__':
    run()
