"""Quantizes a model to 8 or 4 bits: `python -m maxlm.quantize --checkpoint=runs/a --format=int8 --output=runs/a-int8`.

The checkpoint is a workdir (its newest step), `WORKDIR@STEP`, or the directory of one step. Kernels of the blocks are
stored as integer or float8 codes with scales. Embedding, head, norms and biases are unchanged. The new workdir can be
used for inference but not for training. Afterwards, the validation loss of both models is compared on the data of the
run or on --data; --no-eval skips the comparison.
"""

from __future__ import annotations

import argparse
import sys

from maxlm.config.sections.quantization import QUANTIZATION_GROUPS
from maxlm.errors import ArgumentParser, InputError, run_command
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Writes the quantized model and prints sizes and losses before and after."""
    options = _parser().parse_args(argv)
    if options.num_batches < 0:
        raise InputError(f'--num-batches={options.num_batches}: must be at least 0 (0 = all)')

    from maxlm.commands.quantize import execute

    return execute(options)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog='maxlm quantize',
        allow_abbrev=False,
        description=__doc__,
        epilog='example: python -m maxlm.quantize --checkpoint=runs/first --format=int8 --output=runs/first-int8',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = ', '.join(f'{kind}: {group}' for kind, group in QUANTIZATION_GROUPS.items())
    source = PathOption(Kind.DIRECTORY, ANY)
    parser.add_argument(
        '--checkpoint', type=source, required=True, help='workdir, WORKDIR@STEP or directory of one step'
    )
    parser.add_argument(
        '--format', required=True, choices=list(QUANTIZATION_GROUPS), help='storage format of the kernels'
    )
    parser.add_argument(
        '--group', type=int, help=f'maximum number of inputs per scale; 0 = all (default by format: {groups})'
    )
    parser.add_argument('--output', type=PathOption(Kind.DIRECTORY), required=True, help='workdir to create')
    parser.add_argument('--data', type=source, help="data set of maxlm.prepare for the comparison (default: the run's)")
    parser.add_argument('--num-batches', type=int, default=0, help='number of validation batches; 0 = all (default)')
    parser.add_argument('--no-eval', action='store_true', help='skip the loss comparison')
    return parser


def run() -> None:
    """Entry point of `python -m maxlm.quantize` and `maxlm quantize`."""
    sys.exit(run_command(main))


if __name__ == '__main__':
    run()
