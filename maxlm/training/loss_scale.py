"""The factor that keeps the small gradients of float16 from vanishing (Micikevicius et al. 2018, "Mixed Precision")."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import TrainConfig


class LossScale(NamedTuple):
    """What a run in float16 remembers of it."""

    # What the loss is multiplied by before it is differentiated; a power of two where the config's is one.
    scale: jax.Array
    # Steps since it changed.
    good_steps: jax.Array


def first_loss_scale(config: TrainConfig) -> LossScale:
    """The one before the first step."""
    return LossScale(jnp.float32(config.initial_loss_scale), jnp.int32(0))


def next_loss_scale(state: LossScale, overflow: jax.Array, config: TrainConfig) -> LossScale:
    """Half of it after an overflow, never below 1; twice as much after `train.loss_scale_growth_interval`
    updates without one."""
    good_steps = jnp.where(overflow, 0, state.good_steps + 1)
    grows = good_steps >= config.loss_scale_growth_interval
    scale = jnp.where(overflow, jnp.maximum(state.scale / 2, 1), jnp.where(grows, state.scale * 2, state.scale))
    # An infinite scale would be one overflow too much.
    return LossScale(jnp.minimum(scale, 2.0**30), jnp.where(grows, 0, good_steps))
