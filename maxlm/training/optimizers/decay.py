"""Weight decay and learning rates: the last transformation of an update, with settings for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from maxlm.model.parameters import names
from maxlm.training.optimizers.parameter_groups import Settings


def decay_and_scale(
    schedule: optax.Schedule,
    settings: Mapping[tuple[str, ...], Settings],
    decay_scale: Callable[[tuple[str, ...], tuple[int, ...]], float],
    completed: optax.Schedule,
) -> optax.GradientTransformation:
    """Returns the transformation of a direction u to the update -rate · (u + decay · p) of each parameter p.

    With cautious decay, only elements with u p ≥ 0 decay (Chen et al. 2025, "Cautious Weight Decay", arXiv 2510.12402).
    With the cosine schedule, decay has the factor (1 + cos(π f)) / 2, where f is the completed fraction of the run. The
    state is that of `optax.scale_by_learning_rate`.

    Args:
        schedule: learning rate by number of updates, for a `rate_ratio` of 1.
        settings: settings of all parameters by path.
        decay_scale: additional factor of the decay by path and shape of a parameter.
        completed: completed fraction of the run by number of updates.
    """
    rate = optax.scale_by_learning_rate(schedule)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        assert isinstance(state, optax.ScaleByScheduleState)

        def decay_one(path: tuple[Any, ...], direction: jax.Array, param: jax.Array) -> jax.Array:
            own = settings[names(path)]
            if not own.weight_decay:
                return direction
            decay: Any = own.weight_decay * decay_scale(names(path), param.shape)
            if own.weight_decay_schedule == 'cosine':
                decay *= (1 + jnp.cos(jnp.pi * cast(jax.Array, completed(state.count)))) / 2
            if own.cautious_decay:
                param = jnp.where(direction * param >= 0, param, 0)
            decayed: jax.Array = direction + decay * param
            return decayed

        updates = jax.tree_util.tree_map_with_path(decay_one, updates, params)
        updates, new_state = rate.update(updates, state, params)
        scaled = jax.tree_util.tree_map_with_path(lambda path, x: settings[names(path)].rate_ratio * x, updates)
        return scaled, new_state

    return optax.GradientTransformation(rate.init, update)
