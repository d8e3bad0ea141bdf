"""Plans a config on a target."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from pathlib import Path

import jax

from maxlm.api.plan import Plan, planned_data, why_estimated
from maxlm.checkpoint.frozen_models import with_frozen_models
from maxlm.cli.hints import print_next
from maxlm.config.loading import load
from maxlm.config.schema import AUTO, Config
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError
from maxlm.formatting import format_bytes
from maxlm.hardware.chips import Chip
from maxlm.log import Console, logger
from maxlm.planning import plots, tables
from maxlm.planning.budget import BudgetPlan, plan_budget
from maxlm.planning.chinchilla import BESIROGLU, read_runs, refit
from maxlm.planning.cost import PricingTerms
from maxlm.planning.explain import explain
from maxlm.planning.forecast import estimate
from maxlm.planning.gpu_compiler import install_compiler
from maxlm.planning.machine import Machine, usable_memory
from maxlm.planning.report import budget_text, suggestions_text
from maxlm.planning.scaling import Data, Prediction, sweep, sweep_sizes
from maxlm.planning.search import Override
from maxlm.planning.targets import Target, parse_target
from maxlm.runtime.compilation_cache import enable_compilation_cache
from maxlm.storage.json_text import finite_json

# A sweep doubles the number of devices of the target up to this limit.
LARGEST_SWEEP = 4096


def execute(options: argparse.Namespace, overrides: list[str]) -> int:
    """Plans one config on one target, or sweeps over sizes and numbers of devices."""
    terms = PricingTerms(
        price=options.price_per_hour, spot_price=options.spot_price_per_hour, spot_share=options.spot_share
    )
    if options.install_compiler:
        install_compiler()
        if not options.config:
            return EXIT_DONE
    # No program runs on an accelerator, and initializing one is slow and may lock it.
    jax.config.update('jax_platforms', 'cpu')
    # With --json, stdout contains only JSON, and warnings go to stderr.
    with contextlib.nullcontext() if options.json else Console():
        config = with_frozen_models(load(options.config, overrides), is_planned=True)
        target = parse_target(options.target)
        if target.chip.platform == 'cpu':
            # For other targets, the cache could write a compiled program but not read it.
            enable_compilation_cache(config.train.compilation_cache_dir)
        if options.sweep is not None:
            code = _sweep(config, target, planned_data(config, options.vocab_size), terms, options)
            verb, changes = 'plan', [f'--target={options.target}', '--search']
        else:
            verb = 'doctor'
            code, changes = _plan(config, target, terms, options)
        if code == EXIT_DONE and not options.json:
            # The search may have replaced an override.
            names = {argument.partition('=')[0] for argument in changes}
            kept = [argument for it in overrides if (argument := f'--config.{it}').partition('=')[0] not in names]
            print_next('maxlm', verb, f'--config={options.config}', *kept, *changes)
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
    code, suggested = EXIT_DONE if shown.fits else EXIT_FAILED, changes if options.search else []
    if options.json:
        advice = None if found is None else changes
        print(finite_json({**shown.to_dict(), 'advice': advice, 'why_estimated': missing or None}, indent=1))
        return code, suggested
    if missing:
        print(f'All figures are estimates: {missing}')
    print(shown)
    if options.explain:
        print(f'\n{explain(shown.forecast, shown.machine.efficiency)}')
    if options.dollars or options.hours:
        print(budget_text(shown.forecast, terms, dollars=options.dollars, hours=options.hours))
    if options.search or not plan.fits:
        print(_advice(target, found, is_search=options.search))
    return code, suggested


def _advice(target: Target, found: Plan | None, *, is_search: bool) -> str:
    if found is None:
        return (
            f'no tried combination of mesh, micro-batch, model.remat_policy and host memory fits {target.spec}; '
            'use more devices or a smaller model'
        )
    if not found.changes:
        return 'the config is already the fastest that fits'
    label = 'fastest layout that fits' if is_search else 'layout that fits'
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
        print(finite_json({**document, 'budget': plan and tables.as_json(plan)}, indent=1))
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


def _counts(counts: str, target: Target) -> list[int]:
    if counts:
        try:
            return [int(number) for number in counts.split(',')]
        except ValueError:
            raise InputError(f'--sweep={counts}: not a list of numbers of devices; use e.g. --sweep=8,64,512') from None
    doublings = max(1, math.ceil(math.log2(LARGEST_SWEEP / target.num_devices)) + 1)
    return [target.num_devices * 2**doubling for doubling in range(doublings)]


def _predict(config: Config, chip: Chip, num_devices: int) -> Prediction:
    nodes = max(1, num_devices // chip.per_node) if chip.platform == 'gpu' else 1
    target = Target(f'{chip.name}:{num_devices}', chip, num_devices, nodes, (num_devices // nodes, nodes))
    forecast = estimate(config, Machine(target, usable_memory(chip)))
    return Prediction(forecast.time.total, forecast.needed, forecast.fits)
