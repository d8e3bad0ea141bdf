"""Prints the tables of models in docs/models.md: `python -m benchmarks.models`.

All values are computed from the config's shapes; nothing is compiled or allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax

from maxlm.cli.parser import ArgumentParser
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.model.parameters import count_active_parameters, count_parameters
from maxlm.parallel.layout import make_layout
from maxlm.planning.cost import DEFAULT_TERMS
from maxlm.planning.forecast import estimate
from maxlm.planning.machine import Machine, usable_memory
from maxlm.planning.report import cost_of
from maxlm.planning.targets import parse_target
from maxlm.training.flops import training_flops
from maxlm.training.state import abstract_state


class Model(NamedTuple):
    """A row of the table: config, published parameter count, and vocabulary size if the data set determines it."""

    config: str
    published: str
    vocab_size: int = 0


MODELS = (
    Model('configs/1b.py', '1B'),
    Model('configs/neox.py:production_8gpu', '1.2B'),
    Model('configs/depth.py:24-2025', '680M', vocab_size=32),
    Model('configs/depth.py:64-2025', '4.3B', vocab_size=32),
    Model('configs/mix.py:tiny', '85M'),
    Model('configs/mix.py:small', '178M'),
    Model('configs/mix.py:medium', '374M'),
    Model('configs/mix.py:medium-large', '401M'),
    Model('configs/mix.py:large', '763M'),
    Model('configs/mix.py:xlarge', '1.46B'),
    Model('configs/code.py:7b', '7B'),
    Model('configs/code.py:13b', '13B'),
    Model('configs/code.py:30b', '30B'),
    Model('configs/code.py:70b', '70B'),
)
# Configs with experts.
EXPERTS = (
    Model('configs/moe.py:tiny', '', vocab_size=4096),
    Model('configs/moe.py:8x1b', ''),
    Model('configs/moe.py:16b-a3b', '16B-A3B'),
    Model('configs/moe.py:30b-a3b', '30B-A3B'),
)
# Config, target and overrides of the rows of the table of planned runs.
PLANS = (
    ('configs/moe.py:8x1b', 'h100:8', ()),
    ('configs/moe.py:16b-a3b', 'h100:8x2', ()),
    ('configs/moe.py:30b-a3b', 'h100:8x4', ()),
    ('configs/moe.py:8x1b', 'v5p:2x4x4', ('model.remat_policy=none', 'train.per_device_batch_size=4')),
    ('configs/moe.py:16b-a3b', 'v5p:2x4x4', ()),
    ('configs/moe.py:30b-a3b', 'v5p:4x4x4', ()),
)
HEADER = (
    '| config | parameters | published as | GFLOPs per token, causal | full | bytes per parameter in training |',
    '|---|---:|---:|---:|---:|---:|',
)


EXPERTS_HEADER = (
    '| config | parameters | active per token | published as | GFLOPs per token, causal | full |',
    '|---|---:|---:|---:|---:|---:|',
)
PLANS_HEADER = (
    '| config | on | settings | GiB per device | tokens/s | MFU | hours | cost |',
    '|---|---|---|---:|---:|---:|---:|---:|',
)


def resolved(model: Model) -> Config:
    """Returns the row's config, resolved for one device."""
    # The length of a run does not change the size of its model.
    config = load(model.config, ['train.num_steps=1', 'train.per_device_batch_size=0'])
    return resolve(config, platform='cpu', num_devices=1, vocab_size=model.vocab_size, windows=1)


def row(model: Model) -> str:
    """Returns the model's row of the table."""
    config = resolved(model)
    state = abstract_state(config, make_layout(config.mesh))
    parameters = count_parameters(config.model)
    # These arrays exist during the entire step: the state, and a gradient for each parameter.
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(state.params)]
    training_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    flops = training_flops(config.model, config.data.seq_len)
    figures = (
        f'`{model.config}`',
        f'{parameters:,}',
        model.published,
        f'{flops.causal / 1e9:.2f}',
        f'{flops.full / 1e9:.2f}',
        f'{training_bytes / parameters:.1f}',
    )
    return f'| {" | ".join(figures)} |'


def experts_row(model: Model) -> str:
    """Returns the row of a model with experts."""
    config = resolved(model)
    flops = training_flops(config.model, config.data.seq_len)
    figures = (
        f'`{model.config}`',
        f'{count_parameters(config.model):,}',
        f'{count_active_parameters(config.model):,}',
        model.published or '–',
        f'{flops.causal / 1e9:.2f}',
        f'{flops.full / 1e9:.2f}',
    )
    return f'| {" | ".join(figures)} |'


def plan_row(spec: str, target_spec: str, overrides: Sequence[str]) -> str:
    """Returns the row of a planned run, by formulas."""
    target = parse_target(target_spec)
    chip = target.chip
    config = resolve(
        load(spec, list(overrides)),
        platform=chip.platform,
        num_devices=target.num_devices,
        vocab_size=0,
        windows=1,
        capability=chip.capability,
    )
    forecast = estimate(config, Machine(target, usable_memory(chip)))
    cost = cost_of(forecast, DEFAULT_TERMS)
    figures = (
        f'`{spec}`',
        f'`{target_spec}`',
        ', '.join(f'`{each}`' for each in overrides) or 'those of the config',
        f'{forecast.needed / 2**30:.0f}',
        f'{round(forecast.tokens_per_second, -3):,.0f}',
        f'{forecast.mfu.causal:.0%}',
        f'{cost.hours:.0f}',
        f'${round(cost.dollars or 0, -2):,.0f}',
    )
    return f'| {" | ".join(figures)} |'


def main(argv: list[str]) -> int:
    """Prints the tables as Markdown."""
    ArgumentParser(prog='benchmarks.models', allow_abbrev=False, description=__doc__).parse_args(argv)
    print(*HEADER, *map(row, MODELS), '', sep='\n')
    print(*EXPERTS_HEADER, *map(experts_row, EXPERTS), '', sep='\n')
    print(*PLANS_HEADER, *(plan_row(*plan) for plan in PLANS), sep='\n')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
