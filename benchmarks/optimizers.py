"""Times the optimizer update of a config on this device with several options.

    python -m benchmarks.optimizers --config=configs/depth.py:12 [--config.section.key=value …] [--output=FILE]

Gradients are random, and each update waits for the device. The variants alternate, so that the load of the machine
affects all of them. Prints the median, the mean, and the mean of the CPU time of this process, which depends less on
the load. Writes JSON with machine and versions. Only the means include the eigenbases of SOAP, which every 10th update
computes, if the number of updates is a multiple of 10.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.step import machine, resolve_here
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.parallel.layout import make_layout
from maxlm.training.optimizers.trainable import trainable
from maxlm.training.state import TrainState, init_state
from maxlm.training.update import make_update

# The options of a config must not affect the variants.
DEFAULTS = (
    'adam_learning_rate=0',
    'embedding_learning_rate=0',
    'groups=()',
    'cautious_decay=false',
    'weight_decay_schedule=constant',
    'muon_coefficients=newton_schulz',
    'muon_row_equilibration=false',
    'muon_renormalize=false',
    'muon_beta2=0',
    'muon_scaled_decay=false',
    'muon_momentum_warmup_steps=0',
    'muon_final_momentum=0',
)
MUON = ('name=muon',)
POLAR = (*MUON, 'muon_coefficients=polar_express')
# Overrides of keys of the optimizer by name of the variant. Each adds one option to the variant before it.
VARIANTS = {
    'adamw': ('name=adamw',),
    'adamw, group': ('name=adamw', "groups=(('embedding', 'beta2=0.99'),)"),
    'soap': ('name=soap',),
    'muon': MUON,
    'polar express': POLAR,
    'rows, norm': (*POLAR, 'muon_row_equilibration=true', 'muon_renormalize=true'),
    'second moment': (*POLAR, 'muon_row_equilibration=true', 'muon_renormalize=true', 'muon_beta2=0.9'),
}


def main(argv: list[str]) -> int:
    """Times all variants."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.optimizers', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file, with a variant after a colon')
    parser.add_argument('--updates', type=int, default=10, help='timed updates of each variant (default 10)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)

    updates, states = {}, {}
    for name, keys in VARIANTS.items():
        config = resolve_here(options.config, [*overrides, *_keys(keys)])
        updates[name], states[name] = _compiled(config)
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    cpu_seconds = dict.fromkeys(updates, 0.0)
    for _ in range(options.updates):
        for name, update in updates.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            states[name] = jax.block_until_ready(update(states[name]))
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name] += (time.process_time() - cpu_start) / options.updates
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    means = {name: statistics.mean(each) for name, each in seconds.items()}
    for name, median in medians.items():
        mean, cpu = means[name], cpu_seconds[name]
        print(f'{name}: median {1e3 * median:.1f} ms, mean {1e3 * mean:.1f} ms, CPU {1e3 * cpu:.1f} ms')
    if options.output:
        result = {'name': 'optimizers', 'config': options.config, 'overrides': overrides, 'updates': options.updates}
        result |= {'seconds': medians, 'mean_seconds': means, 'cpu_seconds': cpu_seconds, 'load': os.getloadavg()[0]}
        options.output.write_text(json.dumps({**result, 'machine': machine()}, indent=1) + '\n')
    return EXIT_DONE


def _keys(keys: tuple[str, ...]) -> list[str]:
    return [f'optimizer.{key}' for key in (*DEFAULTS, *keys)]


def _compiled(config: Config) -> tuple[Callable[[TrainState], TrainState], TrainState]:
    """Returns the compiled update of a resolved config, and the state after two updates.

    SOAP computes eigenvectors in the first one.
    """
    layout = make_layout(config.mesh)
    state = init_state(config, layout)
    tree: Any
    leaves, tree = jax.tree.flatten(trainable(config, state.params))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    grads = tree.unflatten(
        jax.device_put(jax.random.normal(key, leaf.shape), leaf.sharding)
        for key, leaf in zip(keys, leaves, strict=True)
    )
    change = make_update(config, layout)

    @jax.jit
    def update(state: TrainState, grads: Any) -> TrainState:
        params, opt_state, _, _ = change(state, grads, jnp.bool_(True))
        return state._replace(params=params, opt_state=opt_state, step=state.step + 1)

    # A keyword and a position would be two programs.
    updated = partial(update, grads=grads)
    for _ in range(2):
        state = jax.block_until_ready(updated(state))
    return updated, state


def run() -> None:
    """Entry point of `python -m benchmarks.optimizers`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
