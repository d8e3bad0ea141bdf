"""Dynamic loss scaling, which keeps small gradients from vanishing in float16.

Micikevicius et al. 2018, "Mixed Precision Training".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import TrainConfig


class LossScale(NamedTuple):
    """State of the dynamic loss scale.

    Attributes:
        scale: factor of the loss before differentiation; a power of two if the initial scale is a power of two.
        good_steps: number of good steps since the last change of the scale.
    """

    scale: jax.Array
    good_steps: jax.Array


def first_loss_scale(config: TrainConfig) -> LossScale:
    """Returns the loss scale before the first step."""
    return LossScale(jnp.float32(config.initial_loss_scale), jnp.int32(0))


def loss_factor(state: LossScale | None, mean_factor: float) -> jax.Array | None:
    """Returns the factor of the summed loss, `mean_factor` times the loss scale; None without loss scaling."""
    return None if state is None else state.scale * mean_factor


def next_loss_scale(state: LossScale, overflow: jax.Array, config: TrainConfig) -> LossScale:
    """Halves the scale after an overflow, and doubles it after `train.loss_scale_growth_interval` good updates.

    The scale stays between 1 and 2^30.
    """
    good_steps = jnp.where(overflow, 0, state.good_steps + 1)
    grows = good_steps >= config.loss_scale_growth_interval
    scale = jnp.where(overflow, jnp.maximum(state.scale / 2, 1), jnp.where(grows, state.scale * 2, state.scale))
    # An infinite scale would overflow at the next step.
    return LossScale(jnp.minimum(scale, 2.0**30), jnp.where(grows, 0, good_steps))


def update_loss_scale(
    state: LossScale | None, loss: jax.Array, *, is_finite: jax.Array, ok: jax.Array, config: TrainConfig
) -> tuple[LossScale | None, dict[str, jax.Array]]:
    """Returns the loss scale after a step and its metrics; None and no metrics without loss scaling.

    Args:
        state: loss scale before the step.
        loss: unscaled loss of the step.
        is_finite: True if loss and gradient norm are finite.
        ok: True if the step updates the parameters.
        config: section `train` of the config.
    """
    if state is None:
        return None, {}
    # A lower scale cannot help if the loss itself is not finite, or if the scale is 1.
    overflow = ~is_finite & jnp.isfinite(loss) & (state.scale > 1)
    after = next_loss_scale(state, overflow, config)
    after = jax.tree.map(lambda new, old: jnp.where(ok | overflow, new, old), after, state)
    return after, {'loss_scale': state.scale, 'overflow': overflow}
