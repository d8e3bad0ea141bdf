"""Checks a machine before a run: `maxlm doctor [--config=FILE[:variant] --workdir=DIR …]`.

Checks packages, drivers, memory, disk, buckets, data and clocks, measures devices and links, and runs two steps of the
training. Without --config, only the machine is checked. Each check has a timeout; a check that hangs or raises an error
is reported as a failure. If a run has several processes, start doctor in the same way, in all of them. Exit codes: 0 no
failure (possibly warnings); 1 at least one failure; 2 bad input.
"""

from __future__ import annotations

import argparse
import sys

from maxlm.cli.hints import print_next
from maxlm.cli.parser import ArgumentParser, command_parser, number
from maxlm.cli.process import run
from maxlm.diagnostics.checks.all_checks import CHECKS, choose
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.output import as_json, as_lines, print_results, progress, worst_status
from maxlm.diagnostics.result import CheckStatus
from maxlm.diagnostics.runner import run_checks
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError
from maxlm.storage.json_text import finite_json
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Runs the checks and prints their results."""
    case, options = _read(argv)
    if options.extras:
        # doctor must also work on a machine without the required packages.
        from maxlm.diagnostics.checks.packages import needed_extras

        print(','.join(sorted(needed_extras(case))))
        return EXIT_DONE
    chosen = choose(_names(options.only), _names(options.skip))
    # The first process prints all results; other processes only print problems of their machines.
    is_first = case.process == 0
    with progress(is_shown=is_first and not options.json) as show:
        results = list(run_checks(chosen, case, on_begin=lambda check: show(f'{check.name}: {check.description}')))
    if options.json:
        print(finite_json(as_json(results), indent=1))
    elif is_first:
        print_results(results)
        if worst_status(results) is not CheckStatus.FAILURE:
            print_next(*_next_command(case, options))
    else:
        bad = [result for result in results if result.finding.remedy]
        for line in as_lines(bad):
            print(f'[process {case.process}] {line}', file=sys.stderr)
    return EXIT_FAILED if worst_status(results) is CheckStatus.FAILURE else EXIT_DONE


def _read(argv: list[str]) -> tuple[CheckContext, argparse.Namespace]:
    try:
        from maxlm.config.config_files import split_overrides
        from maxlm.config.loading import load
    except ImportError as error:
        # doctor must also work on a machine without the required packages.
        options, _ = make_parser().parse_known_args(argv)
        if options.config:
            raise InputError(f'--config={options.config}: {error}; run doctor without --config first') from error
        return CheckContext(workdir=options.workdir), options
    overrides, rest = split_overrides(argv)
    options = make_parser().parse_args(rest)
    if overrides and not options.config:
        raise InputError(f'--config.{overrides[0]}: overrides a config; give one with --config=FILE')
    config = load(options.config, overrides) if options.config else None
    context = CheckContext(
        spec=options.config,
        overrides=overrides,
        config=config,
        workdir=options.workdir,
        min_free_gib=options.min_free_gib,
        min_tokens_per_second=options.min_tokens_per_second,
        try_resume=options.try_resume,
    )
    return context, options


def _next_command(case: CheckContext, options: argparse.Namespace) -> list[str]:
    if not options.config:
        return ['maxlm', 'configs']
    verb = 'grpo' if case.config is not None and case.config.train.objective == 'grpo' else 'train'
    workdir = [f'--workdir={options.workdir}'] if options.workdir else []
    return [
        'maxlm',
        verb,
        f'--config={options.config}',
        *workdir,
        *(f'--config.{override}' for override in case.overrides),
    ]


def _names(names: str) -> list[str]:
    return [name.strip() for name in names.split(',') if name.strip()]


def make_parser() -> ArgumentParser:
    width = max(len(check.name) for check in CHECKS)
    listed = '\n'.join(f'  {check.name:<{width}}  {check.description}' for check in CHECKS)
    parser = command_parser('doctor', __doc__, '--config=configs/tiny.py --workdir=runs/first')
    parser.epilog = f'checks:\n{listed}\n\n{parser.epilog}'
    parser.add_shared('--config', required=False, type=PathOption(Kind.FILE, may_be_empty=True), default='')
    parser.add_argument(
        '--workdir',
        type=PathOption(Kind.DIRECTORY, ANY, may_be_empty=True),
        default='',
        help='workdir of the run: a directory or a URL',
    )
    parser.add_argument('--only', default='', metavar='NAME,…', help='run only these checks')
    parser.add_argument('--skip', default='', metavar='NAME,…', help='skip these checks')
    parser.add_argument(
        '--min-free-gib',
        type=number(0, kind=float),
        default=0.0,
        metavar='N',
        help='fail if less disk space is free (default 0)',
    )
    parser.add_argument(
        '--min-tokens-per-second',
        type=number(0, kind=float),
        default=0.0,
        metavar='N',
        help='fail if the trial run is slower (default 0)',
    )
    parser.add_argument(
        '--try-resume', action='store_true', help='also kill a trial run after a checkpoint and restart it'
    )
    parser.add_argument(
        '--extras', action='store_true', help='print the extras of maxlm that the machine and the run need, and exit'
    )
    parser.add_shared('--json')
    return parser


if __name__ == '__main__':
    run('doctor')
