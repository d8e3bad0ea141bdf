"""The update of every parameter: a direction from AdamW or Muon, weight decay, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.config.keys import Config, OptimizerConfig
from maxlm.training.muon import scale_by_muon
from maxlm.training.schedule import make_schedule
from maxlm.training.sharding import Layout

# Kinds of parameters that `optimizer.weight_decay_mask` names. Pulling scales and biases to zero does not regularize.
DECAYED = {
    'matrices': ('table', 'head', 'matrix'),
    'projections': ('matrix',),
    'all': ('table', 'head', 'matrix', 'vector'),
}


def make_optimizer(
    config: Config, axes: Mapping[tuple[str, ...], tuple[str, ...]], layout: Layout
) -> optax.GradientTransformation:
    """The optimizer of a resolved config: p ← p - rate · (direction + weight_decay · p). Clipping is the step's.

    adamw: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization". muon: `scale_by_muon` for the matrices of
    the blocks, AdamW for the rest. The decay is that of the same paper for both.

    Args:
        config: of the run.
        axes: logical axes of every parameter, by path.
        layout: where parameters lie.
    """
    optimizer = config.optimizer
    decayed = DECAYED[optimizer.weight_decay_mask]
    direction = optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon)
    if optimizer.name == 'muon':
        muon = scale_by_muon(
            axes,
            momentum=optimizer.momentum,
            warmup_steps=optimizer.momentum_warmup_steps,
            dtype=jnp.dtype(config.model.dtype),
            layout=layout,
        )
        transforms = {'muon': muon, 'adam': direction}
        direction = optax.partition(transforms, map_kinds(lambda kind, _: 'muon' if kind == 'matrix' else 'adam'))
    return optax.chain(
        direction,
        optax.add_decayed_weights(optimizer.weight_decay, map_kinds(lambda kind, _: kind in decayed)),
        scale_by_rates(make_schedule(optimizer, config.train.num_steps), rate_ratios(optimizer)),
    )


def rate_ratios(config: OptimizerConfig) -> dict[str, float]:
    """By kind of parameter: its peak learning rate in units of `optimizer.learning_rate`."""
    adam = config.adam_learning_rate or config.learning_rate
    table = config.embedding_learning_rate or adam
    peaks = {'matrix': config.learning_rate, 'table': table, 'head': adam, 'vector': adam}
    return {kind: peak / config.learning_rate for kind, peak in peaks.items()}


def scale_by_rates(schedule: optax.Schedule, ratios: Mapping[str, float]) -> optax.GradientTransformation:
    """Times minus the learning rate of each parameter's kind. Its state is optax's, so that of adamw is optax's too."""
    rate = optax.scale_by_learning_rate(schedule)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, Any]:
        updates, state = rate.update(updates, state, params)
        return map_kinds(lambda kind, update: ratios[kind] * update)(updates), state

    return optax.GradientTransformation(rate.init, update)


def kind_of(path: tuple[Any, ...]) -> str:
    """What a parameter is, by the names that the model's modules give: table, head, matrix (of a block) or vector."""
    names = [key.key for key in path]
    if names[-1] in ('embedding', 'position_embedding'):
        return 'table'
    if names[-1] in ('scale', 'bias'):
        return 'vector'
    assert names[-1] == 'kernel', f'parameter {".".join(names)} is of no known kind'
    return 'head' if 'head' in names else 'matrix'


def map_kinds(function: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """A map over a tree of parameters (or of what belongs to them) that hands `function` each one's kind too."""
    return partial(jax.tree_util.tree_map_with_path, lambda path, leaf: function(kind_of(path), leaf))
