"""The optimizer: directions of AdamW or Muon, weight decay, and a learning rate per kind of parameter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from maxlm.config.schema import Config
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.model.parameters import kind_of, names
from maxlm.parallel.layout import Layout
from maxlm.training.optimizers.muon import scale_by_muon
from maxlm.training.optimizers.quantized_moments import Moment, init_moment, rounding_seed, update_moments

# Kinds of parameters by `optimizer.weight_decay_mask`. Decay of scales and biases does not regularize.
DECAYED = {
    'matrices': ('table', 'head', 'matrix', 'router', 'adapter'),
    'projections': ('matrix', 'router', 'adapter'),
    'all': ('table', 'head', 'matrix', 'router', 'adapter', 'vector'),
}


def make_optimizer(
    config: Config,
    axes: Mapping[tuple[str, ...], tuple[str, ...]],
    layout: Layout,
    schedule: optax.Schedule,
) -> optax.GradientTransformation:
    """Returns the optimizer of a resolved config: p ← p - rate · (direction + weight_decay · p).

    adamw is the method of Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization". muon applies
    `scale_by_muon` to the matrices of the blocks and Adam to all other parameters, with the same decoupled decay. The
    training step clips the gradients.

    Args:
        config: config of the run.
        axes: logical axes of every parameter, by path.
        layout: layout of the parameters.
        schedule: learning rate by number of updates.
    """
    optimizer = config.optimizer
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
        transforms: dict[Hashable, optax.GradientTransformation] = {'muon': muon, 'adam': direction}
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
    """Returns the transformation of gradients into Adam's direction (Kingma & Ba 2015), before decay and learning rate.

    With float32 moments it is `optax.scale_by_adam`. Otherwise the same formulas are computed in float32 from the
    stored moments. The state then has optax's structure, with the moments of vectors in float32 and all other moments
    in the format `moments`.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        moments: storage format of the moments, as `optimizer.moment_dtype`.
        axes: logical axes by path, at least of the parameters to which this is applied.
        layout: layout of the parameters.
    """
    if moments == 'float32':
        return optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon)

    def zeros(params: optax.Params, *, signed: bool) -> optax.Updates:
        def init_one(kind: str, param: jax.Array) -> Moment:
            return init_moment(param, 'float32' if kind == 'vector' else moments, signed=signed)

        moments_of: optax.Updates = map_kinds(init_one)(params)
        return moments_of

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        count = jnp.zeros((), jnp.int32)
        return optax.ScaleByAdamState(count, zeros(params, signed=True), zeros(params, signed=False))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        assert isinstance(state, optax.ScaleByAdamState)
        del params
        count = cast(jax.Array, optax.safe_increment(state.count))

        def step(grad: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
            mu = (1 - beta1) * grad + beta1 * mu
            nu = (1 - beta2) * grad**2 + beta2 * nu
            return mu / (1 - beta1**count) / (jnp.sqrt(nu / (1 - beta2**count)) + epsilon), mu, nu

        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        before = zip(leaves, tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu), strict=True)
        after = [
            update_moments(step, grad, stored, seed=rounding_seed(count, index), axes=axes[names(path)], layout=layout)
            for index, ((path, grad), *stored) in enumerate(before)
        ]
        directions, mu, nu = (tree.unflatten(each) for each in zip(*after, strict=True))
        return directions, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def rate_ratios(config: OptimizerConfig) -> dict[str, float]:
    """Returns the peak learning rate of each kind of parameter, divided by `optimizer.learning_rate`."""
    adam = config.adam_learning_rate or config.learning_rate
    table = config.embedding_learning_rate or adam
    peaks = {'matrix': config.learning_rate, 'table': table}
    kinds = ('matrix', 'router', 'adapter', 'table', 'head', 'vector')
    return {kind: peaks.get(kind, adam) / config.learning_rate for kind in kinds}


def scale_by_rates(schedule: optax.Schedule, ratios: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiplies updates by minus the learning rate of the parameter's kind. The state is that of optax."""
    rate = optax.scale_by_learning_rate(schedule)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = rate.update(updates, state, params)
        return map_kinds(lambda kind, update: ratios[kind] * update)(updates), state

    return optax.GradientTransformation(rate.init, update)


def map_kinds(function: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """Returns a map over trees with the structure of the parameters that calls `function(kind, leaf)` for each leaf."""
    return partial(jax.tree_util.tree_map_with_path, lambda path, leaf: function(kind_of(path), leaf))
