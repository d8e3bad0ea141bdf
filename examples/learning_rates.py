"""Trains the same model with several learning rates, stops the bad ones early and plots the losses.

    python -m examples.learning_rates data/mine 1e-3 3e-3 1e-2 --output=learning_rates.png

A run stops after a quarter of its steps if its loss is above the lowest loss of all earlier runs at that step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import maxlm


def make_callback(losses: dict[int, float], deadline: int) -> Callable[[int, dict[str, float]], bool]:
    """Returns a callback that records the lowest loss of each step, and stops a run that is worse at `deadline`.

    Args:
        losses: lowest loss of all runs by step, which the callback updates.
        deadline: step of the comparison.
    """

    def callback(step: int, metrics: dict[str, float]) -> bool:
        if 'train/loss' not in metrics:
            return False
        loss = metrics['train/loss']
        is_worse = loss > losses.get(step, loss)
        losses[step] = min(loss, losses.get(step, loss))
        return step == deadline and is_worse

    return callback


def main(argv: list[str] | None = None) -> dict[float, maxlm.Run]:
    """Trains with each learning rate, prints a table and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', help='data set of maxlm prepare')
    parser.add_argument('rates', nargs='+', type=float, help='learning rates')
    parser.add_argument('--workdir', default='runs/learning_rates', help='directory of the runs (%(default)s)')
    parser.add_argument('--steps', type=int, default=100, help='steps of each run (%(default)s)')
    parser.add_argument('--output', default='learning_rates.png', help='plot to write (%(default)s)')
    options = parser.parse_args(argv)

    config = maxlm.Config.get('tiny', {'data.path': options.data, 'train.num_steps': options.steps})
    config = config.replace({'train.log_every': max(1, options.steps // 20)})
    losses: dict[int, float] = {}
    runs = {}
    for rate in options.rates:
        callback = make_callback(losses, options.steps // 4 // config.train.log_every * config.train.log_every)
        trainer = maxlm.Trainer(
            config.replace({'optimizer.learning_rate': rate, 'optimizer.min_learning_rate': rate / 10}),
            workdir=Path(options.workdir) / f'{rate:g}',
            callbacks=[callback],
        )
        runs[rate] = trainer.train()
    for rate, run in runs.items():
        print(f'{rate:<8g} {run.outcome:<10} step {run.summary["step"]:>5}  loss {run.summary["train/loss"]:.4f}')
    plot(runs, options.output)
    return runs


def plot(runs: dict[float, maxlm.Run], output: str) -> None:
    """Writes a PNG with the training loss of each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout='constrained')
    axes = figure.add_subplot(xlabel='step', ylabel='training loss (nats/token)')
    for rate, run in runs.items():
        lines = [line for line in run.metrics if 'train/loss' in line]
        axes.plot([line['step'] for line in lines], [line['train/loss'] for line in lines], label=f'{rate:g}')
    axes.legend(title='learning rate')
    figure.savefig(output)


if __name__ == '__main__':
    main()
