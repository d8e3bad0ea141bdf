"""Measures how time and memory scale with the model, the batch, the devices and the data.

    python -m benchmarks.growth [--only=depth,width,…] [--rounds=N] [--output=FILE] [--figures=DIR]

Each axis has several sizes that span at least a factor of eight. They are measured on the CPU in turns. The table has
the exponent p of each figure (size to the power p) over all sizes and over the last three, where constant parts matter
less. It also has the expected exponent for large sizes and its reason. Writes a figure of each axis, and JSON with
machine and versions. Axes that are not measured keep their earlier results.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import growth_data, growth_devices, growth_steps
from benchmarks.growth_curves import HEADER, Curve, from_json, picture, table, to_json, write_small_png
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.planning.estimate.cpu import num_cores


class Axis(NamedTuple):
    """One axis: title, label of the sizes in figures, and a function that measures a number of rounds."""

    title: str
    label: str
    measure: Callable[[int], list[Curve]]


AXES: dict[str, Axis] = {
    **{
        name: Axis(f'Growth with {name}', axis.label, partial(growth_steps.measure, axis))
        for name, axis in growth_steps.AXES.items()
    },
    'devices': Axis('Growth with the devices of a process', 'devices', growth_devices.measure),
    'planned': Axis('Growth with the devices of a plan', 'devices', growth_devices.measure_planned),
    'windows': Axis('Growth with the size of the data set', 'windows', growth_data.measure_windows),
    'shards': Axis('Growth with the shards of the data set', 'shards', growth_data.measure_shards),
    'places': Axis('Growth with the position in the data', 'resumed step', growth_data.measure_places),
    'sources': Axis('Growth with weighted sources', 'sources', growth_data.measure_sources),
}


def main(argv: list[str]) -> int:
    """Measures axes, prints their tables, and writes and plots the results."""
    parser = ArgumentParser(prog='benchmarks.growth', allow_abbrev=False, description=__doc__)
    parser.add_argument('--only', default=','.join(AXES), help='axes with commas between them (default: all)')
    parser.add_argument('--rounds', type=int, default=9, help='turns of each size (default 9)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    parser.add_argument('--figures', type=Path, help='directory for pictures')
    options = parser.parse_args(argv)
    names = options.only.split(',')
    for name in names:
        if name not in AXES:
            raise InputError(f'--only={options.only}: no axis {name!r}; one of {", ".join(AXES)}')
    if options.rounds < 1:
        raise InputError(f'--rounds={options.rounds}: needs a number from 1 up')
    results = {}
    if options.output and options.output.exists():
        results = json.loads(options.output.read_text())['axes']
    print(HEADER)
    for name in names:
        curves = AXES[name].measure(options.rounds)
        print(table(name, curves), flush=True)
        # A load above the number of cores means that other processes disturbed the times.
        document = {
            'rounds': options.rounds,
            'load': os.getloadavg()[0],
            'curves': [to_json(curve) for curve in curves],
        }
        results = {axis: results[axis] if axis != name else document for axis in AXES if axis in {name, *results}}
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            facts = {'cores': num_cores(), 'machine': machine(), 'axes': results}
            options.output.write_text(json.dumps(facts, indent=1) + '\n')
    if options.figures:
        draw({name: facts['curves'] for name, facts in results.items()}, options.figures)
    return EXIT_DONE


def draw(results: dict[str, list[dict]], directory: Path) -> None:
    """Plots each axis to growth_AXIS.png."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, curves in results.items():
        figure = picture(AXES[name].title, AXES[name].label, list(map(from_json, curves)))
        write_small_png(figure, directory / f'growth_{name}.png')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
