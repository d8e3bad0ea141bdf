"""Predicts the memory, time and cost of a run on hardware that need not be present.

    maxlm plan --config=FILE[:variant] --target=h100:8 [--config.section.key=value …] [--search] [--json]
    maxlm plan --install-compiler

The training step is compiled for the target: `h100:8`, `h100:8x4` (four nodes), `h200:1`, `a100:8`, `b200:8`,
`v4:2x2x4`, `v5e:4x4`, `v5p:2x2x2`, `v6e:2x4`, `cpu`. If no compiler for the target is installed, or with --estimate,
all figures are estimates, and the output states this. --install-compiler installs the compiler for NVIDIA GPUs; no GPU
is needed. Exit codes: 0 the run fits, or the compiler is installed; 1 the run does not fit; 2 bad input.
"""

from __future__ import annotations

import argparse
import math

from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.config.config_files import split_overrides
from maxlm.errors import InputError, flag
from maxlm.planning.gpu_compiler import CACHE, OPTION, VARIABLE
from maxlm.storage.paths import Kind, PathOption


def main(argv: list[str]) -> int:
    """Plans one config on one target, or sweeps over sizes and numbers of devices."""
    overrides, rest = split_overrides(argv)
    # The option alone does not plan a run, so --config and --target are not required.
    options = make_parser(plans=argv != [OPTION]).parse_args(rest)
    _check(options)
    for name in ('fit_scaling_law', 'output'):
        if getattr(options, name) and options.sweep is None:
            raise InputError(f'{flag(name)} requires --sweep; add --sweep or remove {flag(name)}')
    if options.explain and (options.sweep is not None or options.estimate or options.json):
        raise InputError('--explain prints tables of one compiled program; remove --sweep, --estimate and --json')

    from maxlm.cli.execution.plan import execute

    return execute(options, overrides)


def _check(options: argparse.Namespace) -> None:
    for name in ('price_per_hour', 'spot_price_per_hour', 'dollars', 'hours'):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f'{flag(name)}={value:g}: needs a number above 0')
    if not 0 <= options.spot_share <= 1:
        raise InputError(f'--spot-share={options.spot_share:g}: needs a number from 0 to 1')


def make_parser(*, plans: bool = True) -> ArgumentParser:
    parser = command_parser(
        'plan',
        __doc__,
        '--config=configs/1b.py --target=h100:8x4',
        '--config=configs/1b.py --target=v5p:4x4x4 --search',
        '--config=configs/1b.py --target=h100:8 --sweep --dollars=1000 --output=sweep.html',
    )
    parser.add_shared('--config', required=plans)
    parser.add_argument('--target', required=plans, help='target hardware, e.g. h100:8, h100:8x4 or v4:2x2x4')
    parser.add_argument(
        '--search', action='store_true', help='search for the fastest mesh, micro-batch and model.remat_policy that fit'
    )
    parser.add_argument(
        '--estimate', action='store_true', help='estimates without compilation: faster but less accurate'
    )
    parser.add_argument(
        '--explain',
        action='store_true',
        help='print a table of the time of a GPU step by cause, and the kernels with the most memory traffic',
    )
    parser.add_argument(
        '--sweep',
        nargs='?',
        const='',
        metavar='8,16,…',
        help='estimates for several numbers of devices and model sizes (default: doublings of the target up to 4096)',
    )
    parser.add_argument(
        '--dollars',
        type=float,
        help='budget in dollars: prints the number of steps, or with --sweep the best model size',
    )
    parser.add_argument('--hours', type=float, help='budget in hours on all devices of the target')
    parser.add_argument(
        '--fit-scaling-law',
        nargs='+',
        type=PathOption(Kind.DIRECTORY, as_path=True),
        metavar='WORKDIR',
        help='with --sweep: finished runs to which to fit the scaling law',
    )
    parser.add_argument(
        '--price-per-hour', type=float, help='price of a device in dollars per hour (default: from the built-in table)'
    )
    parser.add_argument(
        '--spot-price-per-hour',
        type=float,
        help='price of a spot device in dollars per hour (default: from the built-in table)',
    )
    parser.add_argument('--spot-share', type=float, default=1.0, help='fraction of steps on spot devices (%(default)s)')
    parser.add_argument(
        '--vocab-size',
        type=int,
        default=0,
        help='vocabulary size if the config does not set it (default: from the data set)',
    )
    parser.add_argument(
        '--output',
        type=PathOption(Kind.FILE, as_path=True),
        help='with --sweep: plot file to write, FILE.png or FILE.html',
    )
    parser.add_argument(
        OPTION,
        action='store_true',
        help=f'install the compiler for NVIDIA GPUs into {CACHE}, or into the directory {VARIABLE}',
    )
    parser.add_shared('--json')
    return parser


if __name__ == '__main__':
    run('plan')
