"""Trains with a loop of one's own around the training step, and saves the state with Orbax.

    python -m examples.own_loop data/mine checkpoints/ --steps=100

The loop reads the metrics of a step only after it has dispatched the next one, so the device never waits for Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import orbax.checkpoint as ocp

import maxlm


def main(argv: list[str] | None = None) -> list[float]:
    """Trains, or resumes from the newest checkpoint; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', help='data set of maxlm prepare')
    parser.add_argument('checkpoints', type=Path, help='directory of the checkpoints')
    parser.add_argument('--steps', type=int, default=100, help='number of steps (%(default)s)')
    parser.add_argument('--save-every', type=int, default=50, help='steps between checkpoints (%(default)s)')
    options = parser.parse_args(argv)

    dataset = maxlm.Dataset.open(options.data)
    config = maxlm.Config.get('tiny', {'train.num_steps': options.steps}).resolve(dataset)
    mesh = maxlm.make_mesh(config)
    state = maxlm.init_state(config, mesh)
    train_step = jax.jit(maxlm.make_train_step(config, mesh), donate_argnums=0)

    losses: list[float] = []
    with ocp.CheckpointManager(options.checkpoints.absolute()) as manager:
        if (newest := manager.latest_step()) is not None:
            state = manager.restore(newest, args=ocp.args.StandardRestore(state))
        start, previous = int(state.step), None
        for step, batch in enumerate(dataset.batches(config, mesh, start=start), start=start + 1):
            state, metrics = train_step(state, batch)
            if previous is not None:
                losses.append(float(previous['loss']))
                print(f'step {step - 1}: loss {losses[-1]:.4f}')
            previous = metrics
            if step % options.save_every == 0 or step == options.steps:
                manager.save(step, args=ocp.args.StandardSave(state))
        if previous is not None:
            losses.append(float(previous['loss']))
            print(f'step {step}: loss {losses[-1]:.4f}')
    return losses


if __name__ == '__main__':
    main()
