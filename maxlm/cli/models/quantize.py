"""Quantizes a model to 8 or 4 bits: `maxlm quantize --checkpoint=runs/a --format=int8 --output=runs/a-int8`.

The checkpoint is a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or the directory of one step. Kernels of
the blocks are stored as integer or float8 codes with scales. Embedding, head, norms and biases are unchanged. The new
workdir can be used for inference but not for training. Afterwards, the validation loss of both models is compared on
the data of the run or on --data; --no-eval skips the comparison.
"""

from __future__ import annotations

from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.config.sections.quantization import QUANTIZATION_GROUPS
from maxlm.storage.paths import Kind, PathOption


def main(argv: list[str]) -> int:
    """Writes the quantized model and prints sizes and losses before and after."""
    options = make_parser().parse_args(argv)

    from maxlm.cli.execution.quantize import execute

    return execute(options)


def make_parser() -> ArgumentParser:
    parser = command_parser('quantize', __doc__, '--checkpoint=runs/first --format=int8 --output=runs/first-int8')
    groups = ', '.join(f'{kind}: {group}' for kind, group in QUANTIZATION_GROUPS.items())
    parser.add_shared('--checkpoint')
    parser.add_argument(
        '--format', required=True, choices=list(QUANTIZATION_GROUPS), help='storage format of the kernels'
    )
    parser.add_argument(
        '--group', type=int, help=f'maximum number of inputs per scale; 0 = all (default by format: {groups})'
    )
    parser.add_argument('--output', type=PathOption(Kind.DIRECTORY), required=True, help='workdir to create')
    parser.add_shared('--data', '--num-batches')
    parser.add_argument('--no-eval', action='store_true', help='skip the loss comparison')
    return parser


if __name__ == '__main__':
    run('quantize')
