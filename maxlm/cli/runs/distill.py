"""Stores a teacher's outputs: `maxlm distill --data=data/a --teacher=runs/a --output=data/a-teacher`.

The teacher runs over all training windows of the data set once. A run with --config.distill.logits_dir=OUTPUT then
learns from its most likely tokens, without running the teacher. To resume, run the same command again.
"""

from __future__ import annotations

from maxlm.cli.parser import SHARED, ArgumentParser, command_parser, number
from maxlm.cli.process import run
from maxlm.storage.paths import Kind, PathOption


def main(argv: list[str]) -> int:
    """Writes the outputs of the teacher and prints their size."""
    options = make_parser().parse_args(argv)

    from maxlm.cli.execution.distill import execute

    return execute(options)


def make_parser() -> ArgumentParser:
    parser = command_parser(
        'distill', __doc__, '--data=data/mine --teacher=runs/first --top-k=64 --seq-len=256 --output=data/mine-teacher'
    )
    directory = PathOption(Kind.DIRECTORY)
    parser.add_argument('--data', type=directory, required=True, help='data set of maxlm prepare')
    parser.add_argument('--teacher', **SHARED['--checkpoint'])
    parser.add_argument('--output', type=directory, required=True, help='directory to create or to complete')
    parser.add_argument('--top-k', type=number(1), default=64, help='tokens to store for each position (default: 64)')
    parser.add_argument(
        '--seq-len', type=number(2), default=1024, help='data.seq_len of the later run, in tokens (default: 1024)'
    )
    parser.add_argument(
        '--temperature',
        type=number(0.01, 1000, float),
        default=1.0,
        help='distill.temperature of the later run (default: 1)',
    )
    parser.add_argument('--no-document-mask', action='store_true', help='the later run has data.document_mask=False')
    parser.add_argument('--batch-size', type=number(1), default=16, help='sequences of a forward pass (default: 16)')
    parser.add_shared('--quiet', help='no progress and no next command')
    return parser


if __name__ == '__main__':
    run('distill')
