"""Prints the table of models in docs/models.md: `python -m benchmarks.models`.

All values are computed from the config's shapes; nothing is compiled or allocated.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, ArgumentParser, exit_code
from maxlm.parallel.layout import make_layout
from maxlm.planning.estimate.flops import training_flops
from maxlm.planning.estimate.parameters import count_parameters
from maxlm.training.state import abstract_state


class Model(NamedTuple):
    """A row of the table: config, published parameter count, and vocabulary size if the data set determines it."""

    config: str
    published: str
    vocab_size: int = 0


MODELS = (
    Model('configs/1b.py', '1B'),
    Model('configs/neox.py:production_8gpu', '1.2B'),
    Model('configs/depth.py:24', '680M', vocab_size=32),
    Model('configs/depth.py:64', '4.3B', vocab_size=32),
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
HEADER = (
    '| config | parameters | published as | GFLOPs per token, causal | full | bytes per parameter in training |',
    '|---|---:|---:|---:|---:|---:|',
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


def main(argv: list[str]) -> int:
    """Prints the table as Markdown."""
    ArgumentParser(prog='benchmarks.models', allow_abbrev=False, description=__doc__).parse_args(argv)
    print(*HEADER, *map(row, MODELS), sep='\n')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
