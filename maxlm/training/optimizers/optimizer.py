"""The update of every parameter: a direction from AdamW or Muon, weight decay, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.config.schema import Config, OptimizerConfig
from maxlm.parallel.layout import Layout
from maxlm.training.optimizers.muon import scale_by_muon
from maxlm.training.optimizers.quantized_moments import init_moment, rounding_seed, update_moments
from maxlm.training.optimizers.schedule import make_schedule
from maxlm.training.optimizers.trainable import ADAPTERS

# Kinds of parameters that `optimizer.weight_decay_mask` names. Pulling scales and biases to zero does not regularize.
DECAYED = {
    'matrices': ('table', 'head', 'matrix', 'adapter'),
    'projections': ('matrix', 'adapter'),
    'all': ('table', 'head', 'matrix', 'adapter', 'vector'),
}


def make_optimizer(
    config: Config,
    axes: Mapping[tuple[str, ...], tuple[str, ...]],
    layout: Layout,
    schedule: optax.Schedule | None = None,
) -> optax.GradientTransformation:
    """The optimizer of a resolved config: p ← p - rate · (direction + weight_decay · p). Clipping is the step's.

    adamw: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization". muon: `scale_by_muon` for the matrices of
    the blocks, AdamW for the rest. The decay is that of the same paper for both.

    Args:
        config: of the run.
        axes: logical axes of every parameter, by path.
        layout: where parameters lie.
        schedule: of the learning rate; None = the config's for `train.num_steps`.
    """
    optimizer = config.optimizer
    schedule = schedule or make_schedule(optimizer, config.train.num_steps)
    decayed = DECAYED[optimizer.weight_decay_mask]
    direction = scale_by_adam(
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.eps,
        moments=optimizer.moment_dtype,
        axes=axes,
        layout=layout,
    )
    if optimizer.name == 'muon':
        muon = scale_by_muon(
            axes,
            momentum=optimizer.muon_momentum,
            warmup_steps=optimizer.muon_momentum_warmup_steps,
            dtype=jnp.dtype(config.model.dtype),
            layout=layout,
            moments=optimizer.moment_dtype,
        )
        transforms = {'muon': muon, 'adam': direction}
        direction = optax.partition(transforms, map_kinds(lambda kind, _: 'muon' if kind == 'matrix' else 'adam'))
    return optax.chain(
        direction,
        optax.add_decayed_weights(optimizer.weight_decay, map_kinds(lambda kind, _: kind in decayed)),
        scale_by_rates(schedule, rate_ratios(optimizer)),
    )


def scale_by_adam(
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    moments: str,
    axes: Mapping[tuple[str, ...], tuple[str, ...]],
    layout: Layout,
) -> optax.GradientTransformation:
    """The direction of Adam (Kingma & Ba 2015), before weight decay and learning rate.

    Moments in float32 are optax's own. Others are computed alike, in float32, from what is stored, and their state is
    optax's with other leaves: those of matrices and tables as `moments` says, those of vectors in float32.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second.
        epsilon: added to the root of the second.
        moments: how they are stored, as `optimizer.moment_dtype`.
        axes: by path, the logical axes of (at least) every parameter that this is applied to.
        layout: where parameters lie.
    """
    if moments == 'float32':
        return optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon)

    def zeros(params: optax.Params, *, signed: bool) -> optax.Updates:
        def init_one(kind: str, param: jax.Array) -> Any:
            return init_moment(param, 'float32' if kind == 'vector' else moments, signed=signed)

        return map_kinds(init_one)(params)

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        count = jnp.zeros((), jnp.int32)
        return optax.ScaleByAdamState(count, zeros(params, signed=True), zeros(params, signed=False))

    def update(
        grads: optax.Updates, state: optax.ScaleByAdamState, params: Any = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        del params
        count = optax.safe_increment(state.count)

        def step(grad: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
            mu = (1 - beta1) * grad + beta1 * mu
            nu = (1 - beta2) * grad**2 + beta2 * nu
            return mu / (1 - beta1**count) / (jnp.sqrt(nu / (1 - beta2**count)) + epsilon), mu, nu

        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(grads)
        before = zip(leaves, tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu), strict=True)
        after = [
            update_moments(step, grad, stored, seed=rounding_seed(count, index), axes=axes[names(path)], layout=layout)
            for index, ((path, grad), *stored) in enumerate(before)
        ]
        directions, mu, nu = (tree.unflatten(each) for each in zip(*after, strict=True))
        return directions, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def rate_ratios(config: OptimizerConfig) -> dict[str, float]:
    """By kind of parameter: its peak learning rate in units of `optimizer.learning_rate`."""
    adam = config.adam_learning_rate or config.learning_rate
    table = config.embedding_learning_rate or adam
    peaks = {'matrix': config.learning_rate, 'adapter': adam, 'table': table, 'head': adam, 'vector': adam}
    return {kind: peak / config.learning_rate for kind, peak in peaks.items()}


def scale_by_rates(schedule: optax.Schedule, ratios: Mapping[str, float]) -> optax.GradientTransformation:
    """Times minus the learning rate of each parameter's kind. Its state is optax's, so that of adamw is optax's too."""
    rate = optax.scale_by_learning_rate(schedule)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, Any]:
        updates, state = rate.update(updates, state, params)
        return map_kinds(lambda kind, update: ratios[kind] * update)(updates), state

    return optax.GradientTransformation(rate.init, update)


def kind_of(path: tuple[Any, ...]) -> str:
    """What a parameter is, by the names that the model's modules give: table, head, matrix (of a block), adapter (of
    one) or vector."""
    *modules, name = names(path)
    if name in ('embedding', 'position_embedding'):
        return 'table'
    if name in ('scale', 'bias'):
        return 'vector'
    if name in ADAPTERS:
        return 'adapter'
    assert name == 'kernel', f'parameter {".".join(names(path))} is of no known kind'
    return 'head' if 'head' in modules else 'matrix'


def names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Of the modules that lead to a parameter, and its own."""
    return tuple(key.key for key in path)


def map_kinds(function: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """A map over a tree of parameters (or of what belongs to them) that hands `function` each one's kind too."""
    return partial(jax.tree_util.tree_map_with_path, lambda path, leaf: function(kind_of(path), leaf))
