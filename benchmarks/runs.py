"""Trains tiny models and a chat model with several seeds, and writes the figures of docs/results.md.

    python -m benchmarks.runs --workdirs=DIR [--seeds=3] [--output=FILE] [--figures=DIR]

Writes the data sets and the workdirs below --workdirs. A run that is complete is only read, so the same command also
continues after an interruption. The JSON contains machine and versions, and is written after each run.
"""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.growth_curves import write_small_png
from benchmarks.posttraining import call
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.planning.plots import BLUE, ORANGE, STYLE
from maxlm.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARGUMENTS = {
    'tiny': ('--config=configs/tiny.py',),
    'moe': ('--config=configs/moe.py:tiny',),
    # SFT of the tiny model on five epochs of chats, with half the learning rate of pretraining.
    'chat': (
        '--config=configs/tiny.py',
        '--config.train.num_steps=60',
        '--config.optimizer.learning_rate=1e-3',
        '--config.optimizer.min_learning_rate=1e-4',
        '--config.optimizer.warmup_steps=5',
        '--config.eval.interval=10',
    ),
}
EXCLUDED = ('site-packages', 'dist-packages', 'test', 'tests', 'encodings', 'pydoc_data')


def main(argv: list[str]) -> int:
    """Runs the missing runs, and prints, writes and plots the results."""
    parser = ArgumentParser(prog='benchmarks.runs', allow_abbrev=False, description=__doc__)
    parser.add_argument('--workdirs', type=Path, required=True, help='directory of the data sets and runs')
    parser.add_argument('--seeds', type=int, default=3, help='number of seeds (default 3)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    parser.add_argument('--figures', type=Path, help='directory for pictures')
    options = parser.parse_args(argv)
    if options.seeds < 1:
        raise InputError(f'--seeds={options.seeds}: must be at least 1')
    prepare(options.workdirs)
    results: dict[str, Any] = {name: [] for name in ARGUMENTS}
    for seed in range(options.seeds):
        for name in results:
            result = run(name, seed, options.workdirs)
            results[name].append(result)
            print(f'{name} seed {seed}: loss {result["curve"][-1][1]:.3f}, {result["seconds"]:.0f} s', flush=True)
            if options.output:
                options.output.write_text(json.dumps({'machine': machine(), 'results': results}, indent=1) + '\n')
    if options.figures:
        figures = {
            'tiny': curves({'tiny': results['tiny']}),
            'moe': curves({'configs/tiny.py': results['tiny'], 'configs/moe.py:tiny': results['moe']}),
            'chat': curves({'chat': results['chat']}),
        }
        for name, figure in figures.items():
            write_small_png(figure, options.figures / f'results_{name}.png')
    return EXIT_DONE


def prepare(directory: Path) -> None:
    """Writes the data sets: Python's standard library as in launch/demo.sh, and conversations about functions."""
    text, tasks = directory / 'data', directory / 'tasks'
    if (directory / 'chats' / 'dataset.json').is_file():
        # Written last. `prepare` would refuse the new files of `examples.tasks`.
        return
    library = ['--input', sysconfig.get_path('stdlib'), '--exclude', *EXCLUDED, '--skip-bad-records', '--quiet']
    call('maxlm.prepare', *library, '--output', str(text), '--tokenizer=bpe:4096', '--validation-fraction=0.05')
    call('examples.tasks', 'synth', '--output', str(tasks), '--wrong-share=0')
    chats = ['--input', str(tasks / 'chats.jsonl'), '--output', str(directory / 'chats'), '--format=chat', '--quiet']
    tokens = ['--chat-template=chatml', f'--tokenizer={text / "tokenizer.json"}', '--pack-seq-len=256']
    call('maxlm.prepare', *chats, *tokens, '--validation-fraction=0.1')


def run(name: str, seed: int, directory: Path) -> dict[str, Any]:
    """Trains a model unless its run is complete, and returns the results of the run."""
    workdir = directory / f'{name}-{seed}'
    words = [*ARGUMENTS[name], f'--config.data.path={directory / ("chats" if name == "chat" else "data")}']
    if name == 'chat':
        words.append(f'--config.train.init_from={directory / f"tiny-{seed}"}')
    seeds = [f'--config.train.seed={seed}', f'--config.data.seed={seed}']
    call('maxlm.train', *words, f'--workdir={workdir}', *seeds)
    return {'seed': seed, **results_of(workdir)}


def results_of(workdir: Path) -> dict[str, Any]:
    """Returns the validation losses by step, the wall time, the number of tokens and the median tokens per second."""
    lines = list(read_metrics(workdir))
    return {
        'curve': [[line['step'], line['eval/loss']] for line in lines if 'eval/loss' in line],
        'seconds': max(line.get('cost/hours', 0.0) for line in lines) * 3600,
        'tokens': max(line.get('train/tokens', 0.0) for line in lines),
        'tokens_per_second': statistics.median(
            line['perf/tokens_per_second'] for line in lines if 'perf/tokens_per_second' in line
        ),
    }


def summary(results: list[dict[str, Any]]) -> dict[str, str]:
    """Returns mean and standard deviation of the last losses, and seconds and tokens per second of each seed."""
    return {
        'loss': spread([result['curve'][-1][1] for result in results], 3),
        **{name: ' / '.join(f'{result[name]:,.0f}' for result in results) for name in ('seconds', 'tokens_per_second')},
    }


def spread(values: list[float], digits: int = 0) -> str:
    """Formats mean and standard deviation of a sample, or its only value."""
    mean = f'{statistics.mean(values):,.{digits}f}'
    return f'{mean} ± {statistics.stdev(values):,.{digits}f}' if len(values) > 1 else mean


def curves(results: dict[str, list[dict[str, Any]]]) -> Figure:
    """Plots the validation loss of one or two models over the steps, with a line for each seed."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout='constrained')
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for (name, runs), color in zip(results.items(), (BLUE, ORANGE), strict=False):
            for run in runs:
                steps, losses = zip(*run['curve'], strict=True)
                axes.plot(steps, losses, color=color, marker='o', markersize=3, alpha=0.7)
            axes.lines[-1].set_label(name)
        title = ' and '.join(results)
        axes.set(xlabel='steps', ylabel='validation loss, nats per token', title=f'{title}, {len(runs)} seeds')
        if len(results) > 1:
            axes.legend(frameon=False)
    return figure


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
