"""Plans presets on one GPU of 10, 24, 48 and 80 GB, and writes the tables of docs/hardware.md.

    python -m benchmarks.hardware [--output=benchmarks/results/hardware_plans.json] [--page=docs/hardware.md]

Each plan is that of `maxlm plan --config=PRESET --target=GPU:1 --search --estimate`: the layout that is estimated to be
the fastest one among those that fit. The second table collects losses that were measured, from the files in
benchmarks/results. Nothing is compiled or trained, so the command takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import maxlm
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.formatting import GIB, format_si
from maxlm.model.parameters import count_parameters

RESULTS = Path('benchmarks/results')
# Memory in GB → a GPU with it, of which other common ones differ in speed.
TARGETS = {10: 'rtx3080:1', 24: 'rtx4090:1', 48: 'l40s:1', 80: 'h100:1'}
# Preset → kind of training and overrides.
PRESETS: dict[str, tuple[str, Mapping[str, Any]]] = {
    'mix:tiny': ('full', {}),
    'mix:small': ('full', {}),
    'neox:tuned_10gb': ('full', {}),
    'mix:medium': ('full', {}),
    '1b': ('full', {}),
    'neox:tuned_1gpu': ('full', {}),
    'mix:xlarge': ('full', {}),
    'code:7b': ('full', {}),
    'code:7b-lora': ('LoRA', {}),
    'code:7b-qlora': ('QLoRA', {}),
}
BEGIN, END = '<!-- {}: python -m benchmarks.hardware -->', '<!-- end of {} -->'
PLANS, LOSSES = 'plans', 'losses'
# Keys of a layout → its name in the table.
SHORT = {
    'train.per_device_batch_size': '',
    'model.remat_policy': 'remat `{}`',
    'model.scan_layers': 'unrolled layers',
    'mesh.host_offload': '{} in host memory ({host_gib:.0f} GiB)',
}


def main(argv: list[str]) -> int:
    """Writes the result file, and the tables into the page."""
    parser = ArgumentParser(prog='benchmarks.hardware', allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--output', type=Path, default=RESULTS / 'hardware_plans.json', help='JSON file to write')
    parser.add_argument('--page', type=Path, default=Path('docs/hardware.md'), help='page whose tables are replaced')
    options = parser.parse_args(argv)
    jax.config.update('jax_platforms', 'cpu')
    # Plans of presets without prepared data warn about it.
    logging.getLogger('maxlm').setLevel(logging.ERROR)
    result: dict[str, Any] = {
        'machine': f'estimated with the formulas of maxlm plan, jax {jax.__version__}; not run',
        'plans': [plan_preset(name) for name in PRESETS],
    }
    options.output.write_text(json.dumps(result, indent=1) + '\n')
    page = options.page.read_text()
    page = replaced(page, PLANS, plan_tables(result['plans']))
    options.page.write_text(replaced(page, LOSSES, loss_table(RESULTS)))
    return EXIT_DONE


def plan_preset(name: str, targets: Mapping[int, str] = TARGETS) -> dict[str, Any]:
    """Returns the plans of a preset by target; None if nothing that is tried fits."""
    kind, overrides = PRESETS[name]
    config = maxlm.Config.get(name, dict(overrides))
    plans: dict[str, Any] = {}
    for target in targets.values():
        plan = maxlm.Plan(config, target, estimate=True)
        found = plan.search()
        plans[target] = found and {
            'micro_batch': found.forecast.config.train.per_device_batch_size,
            'seq_len': found.forecast.config.data.seq_len,
            'memory_gib': round(found.memory_bytes / GIB, 2),
            'host_gib': round(found.forecast.memory.host / GIB, 2),
            'tokens_per_second': round(found.tokens_per_second),
            'changes': found.changes,
        }
    return {'preset': name, 'training': kind, 'parameters': count_parameters(plan.forecast.config.model), **plans}


def plan_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a section for each GPU: its table, and the presets that do not fit."""
    return '\n\n'.join(_section(gb, target, rows) for gb, target in TARGETS.items())


def _section(gb: int, target: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        ['preset', 'batch', 'GiB', 'tokens/s', 'settings'],
        ['---', '---', *['---:'] * 2, '---'],
    ]
    for row in rows:
        if plan := row[target]:
            names = (SHORT.get(key, key + '={}').format(value, **plan) for key, value in plan['changes'].items())
            kind = '' if row['training'] == 'full' else f', {row["training"]}'
            name = f'`{row["preset"]}`, {format_si(row["parameters"])}{kind}'
            batch = f'{plan["micro_batch"]} × {plan["seq_len"]}'
            speed = format_si(plan['tokens_per_second'])
            lines.append([name, batch, f'{plan["memory_gib"]:.1f}', speed, ', '.join(filter(None, names))])
    table = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
    missing = ', '.join(f'`{row["preset"]}`' for row in rows if row[target] is None)
    parts = [f'## {gb} GB: `--target={target}`', table, *([f'Does not fit: {missing}.'] if missing else [])]
    return '\n\n'.join(parts)


def loss_table(results: Path) -> str:
    """Returns the rows of the second table: preset, text, length, loss and result file."""
    lines = [['preset', 'text', 'after', 'loss', 'result file'], ['---', '---', '---', '---', '---']]
    lines += [list(row) for row in _losses(results)]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _losses(results: Path) -> Iterator[tuple[str, str, str, str, str]]:
    def read(name: str) -> Any:
        return json.loads((results / f'{name}.json').read_text())

    name = 'runs_cpu2'
    for run, preset in (('tiny', 'tiny'), ('moe', 'moe:tiny')):
        runs = read(name)['results'][run]
        step = runs[0]['curve'][-1][0]
        losses = [each['curve'][-1][1] for each in runs]
        length = f'{step} steps, {format_si(runs[0]["tokens"])} tokens'
        yield f'`{preset}`', "Python's standard library", length, f'{_spread(losses)} nats per token', f'`{name}`'
    name = 'nanochat_peer_4_1000_cpu2'
    curves = list(read(name)['sides']['maxlm-2026']['bits_per_byte'].values())
    for step in ('100', '500', '1000'):
        text = f'{_spread([curve[step] for curve in curves])} bits per byte'
        yield '`depth:4`, width 128', "Python's documentation", f'{step} steps', text, f'`{name}`'
    for name, preset in (('1b_h200', '`1b`'), ('1b_fp8_h200', '`1b` in fp8')):
        run = read(name)
        length = f'{run["steps"]} steps of {format_si(run["global_batch"] * run["window"])} tokens'
        last = statistics.fmean(run['losses'][-10:])
        yield preset, 'the text of this repository', length, f'{last:.3f} nats per token, last 10 steps', f'`{name}`'


def _spread(values: Sequence[float]) -> str:
    return f'{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}'


def replaced(page: str, name: str, table: str) -> str:
    """Returns a page with another table between its comments."""
    begin, end = BEGIN.format(name), END.format(name)
    pattern = re.compile(f'{re.escape(begin)}.*?{re.escape(end)}', re.DOTALL)
    assert pattern.search(page), name
    return pattern.sub(lambda _: f'{begin}\n\n{table}\n\n{end}', page)


if __name__ == '__main__':
    import sys

    sys.exit(exit_code(main, sys.argv[1:]))
