"""Compares synchronous and asynchronous GRPO rollouts by reward per hour on this machine.

    python -m benchmarks.async_rollouts --config=configs/TASK.py:rl [--config.KEY=VALUE …]
        [--staleness=0,1] [--output=FILE] [--figure=FILE]

Runs `maxlm grpo` with each value of `grpo.max_staleness`, one run after the other. Records the rewards of the rollouts
and the evaluations on held-out problems by the minutes since the first rollout, prints a line for each run, and plots
all. `train.init_from` must name a run of SFT.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.growth_curves import write_small_png
from benchmarks.posttraining import call
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.planning.plots import BLUE, GREY, ORANGE, STYLE
from maxlm.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = (BLUE, ORANGE, GREY)
# Number of rollouts whose mean reward is the reward at the end.
LAST = 10


def main(argv: list[str]) -> int:
    """Runs each, and prints, writes and plots the results."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.async_rollouts', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file with objective grpo, with a variant after a colon')
    parser.add_argument('--staleness', default='0,1', help='values of grpo.max_staleness (default: 0,1; at most three)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    parser.add_argument('--figure', type=Path, help='picture to write')
    options = parser.parse_args(rest)
    values = options.staleness.split(',')
    if not all(value.isdecimal() for value in values) or len(values) > len(COLORS):
        raise InputError(
            f'--staleness={options.staleness}: needs up to {len(COLORS)} integers with commas between them'
        )
    results: dict[str, Any] = {}
    for value in values:
        with tempfile.TemporaryDirectory() as directory:
            seconds = call(
                'maxlm.grpo',
                f'--config={options.config}',
                f'--workdir={directory}/run',
                '--config.metrics.tensorboard=False',
                '--config.metrics.device_stats_interval_seconds=0',
                f'--config.grpo.max_staleness={value}',
                *(f'--config.{override}' for override in overrides),
            )
            results[value] = {'seconds': seconds, **summary(read_metrics(Path(directory) / 'run'))}
        print(line_of(value, results[value]), flush=True)
        if options.output:
            found = {'config': options.config, 'overrides': overrides, 'machine': machine(), 'results': results}
            options.output.write_text(json.dumps(found, indent=1) + '\n')
    if options.figure:
        write_small_png(curves(results), options.figure)
    return EXIT_DONE


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns rewards and accuracies by minutes since the first rollout, and the reward gained per hour."""
    rollouts = [line for line in lines if 'rollout/reward' in line]
    start = rollouts[0]['time']
    rewards = [((line['time'] - start) / 60, line['rollout/reward']) for line in rollouts]
    evaluated = [line for line in lines if 'eval/accuracy' in line]
    last = [reward for _, reward in rewards[-LAST:]]
    return {
        'rewards': rewards,
        'accuracies': [(max(0.0, line['time'] - start) / 60, line['eval/accuracy']) for line in evaluated],
        'reward_seconds': sum(line['rollout/reward_seconds'] for line in rollouts),
        'hidden_seconds': sum(line.get('rollout/hidden_reward_seconds', 0.0) for line in rollouts),
        'wait_seconds': sum(
            line['rollout/reward_wait_seconds'] + line.get('rollout/tool_wait_seconds', 0.0) for line in rollouts
        ),
        'gain_per_hour': (sum(last) / len(last) - rewards[0][1]) / (rewards[-1][0] / 60),
    }


def line_of(staleness: str, result: dict[str, Any]) -> str:
    """Formats a result in one line."""
    first, last = result['accuracies'][0][1], result['accuracies'][-1][1]
    return (
        f'staleness {staleness:<3} {result["seconds"]:.0f} s, reward {result["gain_per_hour"]:+.2f} per hour, '
        f'accuracy {first:.3f} → {last:.3f}; rewards {result["reward_seconds"]:.0f} s, of which '
        f'{result["hidden_seconds"]:.0f} s hidden; the devices waited {result["wait_seconds"]:.0f} s'
    )


def curves(results: dict[str, Any]) -> Figure:
    """Plots the reward of each rollout and the accuracy on held-out problems over time."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout='constrained')
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for (value, result), color in zip(results.items(), COLORS, strict=False):
            name = f'staleness {value}'
            axes.plot(*zip(*result['rewards'], strict=True), color=color, linewidth=1, label=f'{name}: reward')
            minutes, accuracies = zip(*result['accuracies'], strict=True)
            axes.plot(minutes, accuracies, 'o--', color=color, markersize=4, label=f'{name}: held-out accuracy')
        axes.set(xlabel='minutes since the first rollout', ylabel='reward, accuracy')
        axes.set_ylim(bottom=0)
        axes.legend(loc='lower left', frameon=False)
    return figure


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
