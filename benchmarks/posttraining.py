"""Measures accuracy and duration of post-training a small model with SFT and then GRPO on this machine.

    python -m benchmarks.posttraining [--tasks=arithmetic,synth] [--seeds=0,1,2] [--output=FILE] [--figures=DIR]

For each task and seed, runs the commands in the docstring of configs/TASK.py: writing problems, preparing the chats,
`maxlm train` with TASK:sft and `maxlm grpo` with TASK:rl. The tasks guess_number, calculator and write_function have
environments, and their commands are in configs/environments.py. Records the runs' evaluations on held-out problems and
the wall time. Prints a table, plots the curves, and writes JSON with machine and versions after each run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.growth_curves import write_small_png
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.planning.plots import BLUE, GREY, ORANGE, STYLE
from maxlm.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tokenizer and sequence length of each task's chats, as in its config.
TASKS = {'arithmetic': ('bytes', 64), 'synth': ('bpe:400', 128)}
ENVIRONMENTS = dict.fromkeys(('guess_number', 'calculator', 'write_function'), ('bpe:512', 256))
SHOWN = {
    'accuracy': ('greedy answer', BLUE),
    'pass_at_1': ('sampled answers', ORANGE),
    'pass_at_k': ('best of 4 samples', GREY),
}


def main(argv: list[str]) -> int:
    """Runs tasks, and prints, writes and plots the results."""
    parser = ArgumentParser(prog='benchmarks.posttraining', allow_abbrev=False, description=__doc__)
    default = ','.join(TASKS)
    parser.add_argument('--tasks', default=default, help=f'tasks with commas between them (default: {default})')
    parser.add_argument('--seeds', default='0,1,2', help="seeds (default: 0,1,2); '' = only draw --output")
    parser.add_argument('--output', type=Path, help='JSON file to write; other tasks and seeds keep what it has')
    parser.add_argument('--figures', type=Path, help='directory for pictures')
    options = parser.parse_args(argv)
    tasks = options.tasks.split(',')
    for task in tasks:
        if task not in TASKS | ENVIRONMENTS:
            raise InputError(f'--tasks: no task {task!r}; one of {", ".join(TASKS | ENVIRONMENTS)}')
    try:
        seeds = [int(seed) for seed in options.seeds.split(',') if seed]
    except ValueError as error:
        raise InputError(f'--seeds={options.seeds}: needs integers with commas between them') from error
    results: dict[str, Any] = results_in(options.output)
    for seed in seeds:
        for task in tasks:
            with tempfile.TemporaryDirectory() as directory:
                result = run_task(task, seed, Path(directory))
            print(line_of(task, result), flush=True)
            # Another process may have written results of other tasks.
            results |= results_in(options.output)
            others = [each for each in results.get(task, ()) if each['seed'] != seed]
            results[task] = sorted([*others, result], key=lambda each: each['seed'])
            if options.output:
                options.output.write_text(json.dumps({'machine': machine(), 'results': results}, indent=1) + '\n')
    if options.figures:
        for task in tasks:
            write_small_png(curves(results[task], task), options.figures / f'posttraining_{task}.png')
    return EXIT_DONE


def results_in(path: Path | None) -> dict[str, Any]:
    """Returns the results by task in a file that may not exist."""
    return json.loads(path.read_text())['results'] if path and path.is_file() else {}


def run_task(task: str, seed: int, directory: Path) -> dict[str, Any]:
    """Returns the evaluations of GRPO by step (0 is the model after SFT) and the seconds of both runs."""
    tokenizer, window = (TASKS | ENVIRONMENTS)[task]
    data, sft, rl = directory / task, directory / 'sft', directory / 'rl'
    quiet = ['--config.metrics.tensorboard=False', '--config.metrics.device_stats_interval_seconds=0']
    seeds = [f'--config.train.seed={seed}', f'--config.data.seed={seed}', *quiet]
    if task in ENVIRONMENTS:
        config, prompts = f'configs/environments.py:{task}-', []
        call('examples.demonstrations', task, '--output', str(data / 'chats.jsonl'), '--seed', str(seed))
    else:
        config = f'configs/{task}.py:'
        prompts = [
            f'--config.grpo.{key}={data / f"{name}.jsonl"}'
            for key, name in (('prompts', 'prompts'), ('eval_prompts', 'held_out'))
        ]
        call('examples.tasks', task, '--output', str(data), '--seed', str(seed))
    chats = ['--input', str(data / 'chats.jsonl'), '--output', str(data / 'chats'), '--format=chat', '--quiet']
    call('maxlm.prepare', *chats, '--chat-template=chatml', f'--tokenizer={tokenizer}', f'--pack-seq-len={window}')
    sft_seconds = call(
        'maxlm.train',
        f'--config={config}sft',
        f'--workdir={sft}',
        f'--config.data.path={data / "chats"}',
        *seeds,
    )
    rl_seconds = call(
        'maxlm.grpo',
        f'--config={config}rl',
        f'--workdir={rl}',
        f'--config.train.init_from={sft}',
        *prompts,
        *seeds,
    )
    evaluations = [
        {'step': line['step'], **{name: line[f'eval/{name}'] for name in SHOWN if f'eval/{name}' in line}}
        for line in read_metrics(rl)
        if 'eval/accuracy' in line
    ]
    of_rollouts = {
        name: [(line['step'], line[key]) for line in read_metrics(rl) if key in line]
        for name, key in (('rewards', 'rollout/reward'), ('turns', 'rollout/turns'))
    }
    return {
        'seed': seed,
        'sft_seconds': sft_seconds,
        'rl_seconds': rl_seconds,
        'evaluations': evaluations,
        **{name: values for name, values in of_rollouts.items() if values},
    }


def call(module: str, *arguments: str) -> float:
    """Runs a module and returns its seconds."""
    began = time.monotonic()
    subprocess.run([sys.executable, '-m', module, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def line_of(task: str, result: dict[str, Any]) -> str:
    """Formats a result in one line."""
    first, last = result['evaluations'][0], result['evaluations'][-1]
    return (
        f'{task:<11} seed {result["seed"]}  greedy answer {first["accuracy"]:.3f} → {last["accuracy"]:.3f}  '
        f'sampled {first["pass_at_1"]:.3f} → {last["pass_at_1"]:.3f}  '
        f'{result["sft_seconds"]:.0f} s of SFT, {result["rl_seconds"]:.0f} s of GRPO'
    )


def curves(results: list[dict[str, Any]], task: str) -> Figure:
    """Plots the accuracy on held-out problems over the GRPO steps, with a line for each seed."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout='constrained')
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for name, (label, color) in SHOWN.items():
            for number, result in enumerate(results):
                steps = [line['step'] for line in result['evaluations']]
                values = [line[name] for line in result['evaluations']]
                axes.plot(steps, values, color=color, marker='o', markersize=3, label=None if number else label)
        axes.set(xlabel='GRPO steps', ylabel='accuracy on held-out problems', ylim=(0, 1.02), title=task)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc='lower right', frameon=False)
    return figure


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
