"""Plots the comparison with other frameworks: `python -m benchmarks.figures [--output=docs/figures]`.

Reads benchmarks/results/ and writes the figures of docs/performance.md. `benchmarks.growth` plots the scaling curves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.growth_curves import write_small_png
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.planning.plots import BLUE, GREY, ORANGE, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / 'results'
LABELS = {
    'maxlm': 'maxlm',
    'torch': 'PyTorch GPT, eager',
    'torch, compiled': 'PyTorch GPT, compiled',
    'transformers': 'Transformers GPT-2, eager',
    'transformers, compiled': 'Transformers GPT-2, compiled',
}


def main(argv: list[str]) -> int:
    """Writes the figures."""
    parser = ArgumentParser(prog='benchmarks.figures', allow_abbrev=False, description=__doc__)
    parser.add_argument('--output', type=Path, default=Path('docs/figures'), help='directory (default docs/figures)')
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    results = json.loads((RESULTS / 'peers_cpu2.json').read_text())['results']
    write_small_png(peers(results), options.output / 'peers_cpu.png')
    return EXIT_DONE


def peers(results: list[dict[str, Any]]) -> Figure:
    """Plots milliseconds per step, with a panel for each size and number of threads."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(result['size'] for result in results))
    threads = sorted({result['threads'] for result in results})
    with rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(sizes) + 2.0, 2.0 * len(threads) + 0.6), layout='constrained')
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(threads), len(sizes), squeeze=False, sharey=True)
        for result in results:
            axes = panels[threads.index(result['threads'])][sizes.index(result['size'])]
            names = list(reversed(result['seconds']))
            milliseconds = [result['seconds'][name] * 1e3 for name in names]
            fastest = min(value for name, value in result['seconds'].items() if name != 'maxlm') * 1e3
            colors = [
                BLUE if name == 'maxlm' else ORANGE if value == fastest else GREY
                for name, value in zip(names, milliseconds, strict=True)
            ]
            axes.barh([LABELS[name] for name in names], milliseconds, color=colors, height=0.7)
            for row, value in enumerate(milliseconds):
                axes.text(value, row, f' {value:.0f}' if value >= 100 else f' {value:.1f}', va='center', fontsize=8)
            axes.set_xlim(0, 1.2 * max(milliseconds))
            plural = 's' if result['threads'] > 1 else ''
            axes.set_title(f'{result["size"]}, {result["threads"]} thread{plural}', fontsize=10)
            axes.tick_params(axis='y', length=0)
        for axes in panels[-1]:
            axes.set_xlabel('ms per step')
        figure.suptitle(
            'Training step time on a CPU, float32 (blue: maxlm; orange: fastest peer)', x=0.01, ha='left', fontsize=12
        )
    return figure


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
