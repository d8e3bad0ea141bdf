"""The optimizer: directions of AdamW or Muon, then weight decay and learning rate of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from maxlm.config.schema import Config
from maxlm.model.parameters import kind_of, kind_of_names, names
from maxlm.parallel.layout import Layout
from maxlm.training.optimizers.decay import decay_and_scale
from maxlm.training.optimizers.muon import Rescaling, momentum_schedule, scale_by_muon, update_scale
from maxlm.training.optimizers.parameter_groups import settings_of
from maxlm.training.optimizers.quantized_moments import Moment, init_moment, rounding_seed, update_moments
from maxlm.training.optimizers.schedule import RunFractions, make_run_fractions


def make_optimizer(
    config: Config,
    axes: Mapping[tuple[str, ...], tuple[str, ...]],
    layout: Layout,
    schedule: optax.Schedule,
    fractions: RunFractions | None = None,
) -> optax.GradientTransformation:
    """Returns the optimizer of a resolved config: p ← p - rate · (direction + weight_decay · p).

    adamw is the method of Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization". muon applies
    `scale_by_muon` to the matrices of the blocks and Adam to all other parameters, with the same decoupled decay. The
    training step clips the gradients. Parameter groups change the settings of a parameter, but not the structure of the
    state.

    Args:
        config: config of the run.
        axes: logical axes of every parameter, by path.
        layout: layout of the parameters.
        schedule: learning rate by number of updates.
        fractions: completed fractions of the run by number of updates; None selects those of `train.num_steps`.
    """
    optimizer = config.optimizer
    fractions = fractions or make_run_fractions(optimizer, config.train.num_steps)
    settings = {path: settings_of(config, path) for path in axes if kind_of_names(path) != 'codes'}
    common = AdamConstants(optimizer.beta1, optimizer.beta2, optimizer.eps)
    constants = {path: AdamConstants(own.beta1, own.beta2, own.eps) for path, own in settings.items()}
    direction = scale_by_adam(
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.eps,
        moments=optimizer.moment_dtype,
        axes=axes,
        layout=layout,
        constants={path: own for path, own in constants.items() if own != common},
    )
    if optimizer.name == 'muon':
        muon = scale_by_muon(
            axes,
            momentum=momentum_schedule(
                optimizer.muon_momentum,
                warmup_steps=optimizer.muon_momentum_warmup_steps,
                final=optimizer.muon_final_momentum,
                decayed=fractions.decay,
            ),
            dtype=jnp.dtype(config.model.dtype),
            layout=layout,
            moments=optimizer.moment_dtype,
            rescaling=Rescaling(
                optimizer.muon_coefficients,
                optimizer.muon_row_equilibration,
                optimizer.muon_renormalize,
                optimizer.muon_beta2,
            ),
        )
        transforms: dict[Hashable, optax.GradientTransformation] = {'muon': muon, 'adam': direction}
        direction = optax.partition(transforms, map_kinds(lambda kind, _: 'muon' if kind == 'matrix' else 'adam'))

    def decay_scale(path: tuple[str, ...], shape: tuple[int, ...]) -> float:
        scales = optimizer.muon_scaled_decay and kind_of_names(path) == 'matrix'
        return update_scale(shape, axes[path]) if scales else 1.0

    return optax.chain(
        direction,
        # Keeps the structure of optax.adamw's state, so that checkpoints are interchangeable.
        optax.masked(optax.identity(), map_kinds(lambda _, __: True)),
        decay_and_scale(schedule, settings, decay_scale, fractions.run),
    )


class AdamConstants(NamedTuple):
    """Constants of Adam for a parameter: decays of the two moments, and the number added to the root."""

    beta1: float
    beta2: float
    epsilon: float


def scale_by_adam(
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    moments: str,
    axes: Mapping[tuple[str, ...], tuple[str, ...]],
    layout: Layout,
    constants: Mapping[tuple[str, ...], AdamConstants] | None = None,
) -> optax.GradientTransformation:
    """Returns the transformation of gradients into Adam's direction (Kingma & Ba 2015), before decay and learning rate.

    With float32 moments and without `constants` it is `optax.scale_by_adam`. Otherwise the same formulas are computed
    in float32 from the stored moments. The state then has optax's structure, with the moments of vectors in float32 and
    all other moments in the format `moments`.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        moments: storage format of the moments, as `optimizer.moment_dtype`.
        axes: logical axes by path, at least of the parameters to which this is applied.
        layout: layout of the parameters.
        constants: constants of the parameters that have their own, by path.
    """
    constants = constants or {}
    common = AdamConstants(beta1, beta2, epsilon)
    if moments == 'float32' and not constants:
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

        def step(own: AdamConstants, grad: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
            beta1, beta2, epsilon = own
            mu = (1 - beta1) * grad + beta1 * mu
            nu = (1 - beta2) * grad**2 + beta2 * nu
            return mu / (1 - beta1**count) / (jnp.sqrt(nu / (1 - beta2**count)) + epsilon), mu, nu

        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        before = zip(leaves, tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu), strict=True)
        after = []
        for index, ((path, grad), *stored) in enumerate(before):
            function = partial(step, constants.get(names(path), common))
            seed = rounding_seed(count, index)
            after.append(update_moments(function, grad, stored, seed=seed, axes=axes[names(path)], layout=layout))
        directions, mu, nu = (tree.unflatten(each) for each in zip(*after, strict=True))
        return directions, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def map_kinds(function: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """Returns a map over trees with the structure of the parameters that calls `function(kind, leaf)` for each leaf."""
    return partial(jax.tree_util.tree_map_with_path, lambda path, leaf: function(kind_of(path), leaf))
