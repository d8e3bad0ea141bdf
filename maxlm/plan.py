"""Predicts the memory, time and cost of a run on hardware that need not be present.

    python -m maxlm.plan --config=FILE[:variant] --target=h100:8 [--config.section.key=value …] [--search] [--json]
    python -m maxlm.plan --install-compiler

The training step is compiled for the target: `h100:8`, `h100:8x4` (four nodes), `h200:1`, `a100:8`, `b200:8`,
`v4:2x2x4`, `v5e:4x4`, `v5p:2x2x2`, `v6e:2x4`, `cpu`. If no compiler for the target is installed, or with --estimate,
all figures are estimates, and the output states this. --install-compiler installs the compiler for NVIDIA GPUs; no GPU
is needed. Exit codes: 0 the run fits, or the compiler is installed; 1 the run does not fit; 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from pathlib import Path

import jax

from maxlm.api.plan import Plan, planned_data, why_estimated
from maxlm.config.loading import load, split_overrides
from maxlm.config.schema import AUTO, Config
from maxlm.errors import EXIT_DONE, EXIT_FAILED, ArgumentParser, InputError, exit_code, flag
from maxlm.formatting import format_bytes
from maxlm.hardware.chips import Chip
from maxlm.hints import print_next
from maxlm.log import Console, logger
from maxlm.planning import plots, tables
from maxlm.planning.budget import BudgetPlan, plan_budget
from maxlm.planning.chinchilla import BESIROGLU, read_runs, refit
from maxlm.planning.cost import PricingTerms
from maxlm.planning.explain import explain
from maxlm.planning.forecast import estimate
from maxlm.planning.gpu_compiler import CACHE, OPTION, VARIABLE, install_compiler
from maxlm.planning.machine import Machine, usable_memory
from maxlm.planning.report import budget_text, suggestions_text
from maxlm.planning.scaling import Data, Prediction, sweep, sweep_sizes
from maxlm.planning.search import Override
from maxlm.planning.targets import Target, parse_target
from maxlm.runtime.compilation_cache import enable_compilation_cache
from maxlm.storage.paths import Kind, PathOption
from maxlm.workdir.teacher import with_teacher

# A sweep doubles the number of devices of the target up to this limit.
LARGEST_SWEEP = 4096
EXAMPLES = """examples:
  maxlm plan --config=configs/1b.py --target=h100:8x4
  maxlm plan --config=configs/1b.py --target=v5p:4x4x4 --search
  maxlm plan --config=configs/1b.py --target=h100:8 --sweep --dollars=1000 --output=sweep.html"""


def main(argv: list[str]) -> int:
    """Plans one config on one target, or sweeps over sizes and numbers of devices."""
    overrides, rest = split_overrides(argv)
    # The option alone does not plan a run, so --config and --target are not required.
    options = _parser(plans=argv != [OPTION]).parse_args(rest)
    terms = _terms(options)
    for name in ('fit_scaling_law', 'output'):
        if getattr(options, name) and options.sweep is None:
            raise InputError(f'{flag(name)} requires --sweep; add --sweep or remove {flag(name)}')
    if options.explain and (options.sweep is not None or options.estimate or options.json):
        raise InputError('--explain prints tables of one compiled program; remove --sweep, --estimate and --json')
    if options.install_compiler:
        install_compiler()
        if not options.config:
            return EXIT_DONE
    # No program runs on an accelerator, and initializing one is slow and may lock it.
    jax.config.update('jax_platforms', 'cpu')
    # With --json, stdout contains only JSON, and warnings go to stderr.
    with contextlib.nullcontext() if options.json else Console():
        config = with_teacher(load(options.config, overrides))
        target = parse_target(options.target)
        if target.chip.platform == 'cpu':
            # For other targets, the cache could write a compiled program but not read it.
            enable_compilation_cache(config.train.compilation_cache_dir)
        if options.sweep is not None:
            code = _sweep(config, target, planned_data(config, options.vocab_size), terms, options)
            verb, words = 'plan', [f'--target={options.target}', '--search']
        else:
            verb = 'doctor'
            code, words = _plan(config, target, terms, options)
        if code == EXIT_DONE and not options.json:
            # The search may have replaced an override.
            names = {word.partition('=')[0] for word in words}
            given = [word for it in overrides if (word := f'--config.{it}').partition('=')[0] not in names]
            print_next('maxlm', verb, f'--config={options.config}', *given, *words)
        return code


def _plan(config: Config, target: Target, terms: PricingTerms, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Prints the plan. Returns the exit code and the options that --search has found."""
    missing = '--estimate' if options.estimate else why_estimated(config, target, estimate=False)
    if options.explain and (missing or target.chip.platform != 'gpu'):
        reason = missing or f'{target.spec} is not a GPU; use a target such as --target=h100:1'
        raise InputError(f'--explain requires a compiled GPU program: {reason}')
    if not missing:
        print(f'compiling for {target.spec} (seconds to minutes) …', file=sys.stderr, flush=True)
    plan = shown = Plan(config, target.spec, estimate=options.estimate, vocab_size=options.vocab_size, terms=terms)
    found = plan.search() if options.search or not plan.fits else None
    if options.search and found:
        shown = found
    changes = [] if found is None else [Override(*change).override for change in found.changes.items()]
    code, words = EXIT_DONE if shown.fits else EXIT_FAILED, changes if options.search else []
    if options.json:
        advice = None if found is None else changes
        print(json.dumps({**shown.to_dict(), 'advice': advice, 'why_estimated': missing or None}, indent=1))
        return code, words
    if missing:
        print(f'All figures are estimates: {missing}')
    print(shown)
    if options.explain:
        print(f'\n{explain(shown.forecast, shown.machine.efficiency)}')
    if options.dollars or options.hours:
        print(budget_text(shown.forecast, terms, dollars=options.dollars, hours=options.hours))
    if options.search or not plan.fits:
        print(_advice(target, found, asked=options.search))
    return code, words


def _advice(target: Target, found: Plan | None, *, asked: bool) -> str:
    if found is None:
        return (
            f'no tried combination of mesh, micro-batch, model.remat_policy and host memory fits {target.spec}; '
            'use more devices or a smaller model'
        )
    if not found.changes:
        return 'the config is already the fastest that fits'
    label = 'fastest layout that fits' if asked else 'layout that fits'
    changes = [Override(*change) for change in found.changes.items()]
    return (
        f'{label}: {format_bytes(found.memory_bytes)}, {found.step_seconds:.3g} s per step, '
        f'{found.tokens_per_second:,.0f} tokens/s:\n  {suggestions_text(changes)}'
    )


def _sweep(config: Config, target: Target, data: Data, terms: PricingTerms, options: argparse.Namespace) -> int:
    budget = options.dollars or options.hours
    chip, price = target.chip, terms.price
    if config.train.per_device_batch_size == AUTO:
        raise InputError(
            'train.per_device_batch_size=auto: --sweep needs the number of sequences; set a number, e.g. 4'
        )
    law = BESIROGLU
    notes = [
        f'Estimates of maxlm plan for {chip.name}, without compilation.',
        'Strong: fixed batch on more devices. Weak: the batch grows with the devices.',
    ]
    if options.fit_scaling_law:
        fit = refit(read_runs(options.fit_scaling_law))
        law = fit.law
        held_out = '' if fit.held_out_error is None else f', held-out error {fit.held_out_error:.2%}'
        notes.append(f'Scaling law fitted to {fit.runs} runs, error {fit.error:.2%}{held_out}')
    rows = sweep(config, chip, _counts(options.sweep, target), _predict, data, price=price)
    points = sweep_sizes(config, chip, target.num_devices, _predict, data, price=price)
    plan = None
    if budget:
        plan = plan_budget(points, chip, dollars=options.dollars, hours=options.hours, law=law, terms=terms)
    title = f'{options.config} on {chip.name}'
    sizes = [point.row for point in points]
    if options.output:
        _write(options.output, title, rows, sizes, plan, notes)
    if options.json:
        document = {'notes': notes, 'scaling': tables.as_json(rows), 'sizes': tables.as_json(sizes)}
        print(json.dumps({**document, 'budget': plan and tables.as_json(plan)}, indent=1))
        return EXIT_DONE
    print('\n'.join(notes))
    print(f'\n{tables.scaling_table(rows)}\n\nmodel sizes on {target.spec}\n{tables.scaling_table(sizes)}')
    if plan:
        print(f'\n{tables.budget_table(plan)}')
    return EXIT_DONE


def _write(path: Path, title: str, rows: list, sizes: list, plan: BudgetPlan | None, notes: list[str]) -> None:
    if path.suffix == '.html':
        plots.write_html(path, title, rows=[*rows, *sizes], plan=plan, notes=notes)
    else:
        plots.write_png(plots.scaling_figure(rows, title), path)
    logger.info(f'wrote {path}')


def _counts(given: str, target: Target) -> list[int]:
    if given:
        try:
            return [int(number) for number in given.split(',')]
        except ValueError:
            raise InputError(f'--sweep={given}: not a list of numbers of devices; use e.g. --sweep=8,64,512') from None
    doublings = max(1, math.ceil(math.log2(LARGEST_SWEEP / target.num_devices)) + 1)
    return [target.num_devices * 2**doubling for doubling in range(doublings)]


def _predict(config: Config, chip: Chip, num_devices: int) -> Prediction:
    nodes = max(1, num_devices // chip.per_node) if chip.platform == 'gpu' else 1
    target = Target(f'{chip.name}:{num_devices}', chip, num_devices, nodes, (num_devices // nodes, nodes))
    forecast = estimate(config, Machine(target, usable_memory(chip)))
    return Prediction(forecast.time.total, forecast.needed, forecast.fits)


def _terms(options: argparse.Namespace) -> PricingTerms:
    for name in ('price_per_hour', 'spot_price_per_hour', 'dollars', 'hours'):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f'{flag(name)}={value:g}: needs a number above 0')
    if not 0 <= options.spot_share <= 1:
        raise InputError(f'--spot-share={options.spot_share:g}: needs a number from 0 to 1')
    return PricingTerms(
        price=options.price_per_hour, spot_price=options.spot_price_per_hour, spot_share=options.spot_share
    )


def _parser(*, plans: bool) -> ArgumentParser:
    parser = ArgumentParser(
        prog='maxlm plan',
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        '--config',
        type=PathOption(Kind.FILE),
        required=plans,
        help='config of the run: configs/x.py, configs/x.py:big, or a config.json',
    )
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
    parser.add_argument('--json', action='store_true', help='output as one JSON object')
    return parser


def run() -> None:
    """Entry point of `python -m maxlm.plan` and `maxlm plan`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
