"""Which steps are left out: those that are not finite, and those far above what good steps were.

A level is judged by median and median absolute deviation, which single outliers do not move (Huber & Ronchetti 2009,
"Robust Statistics"). Only good steps enter the window, so a spike never makes the next one look normal.

Shapes: Q quantities (loss, logarithm of the gradient norm), W steps of the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import GuardConfig

# Median absolute deviations in a standard deviation of the normal distribution.
NORMAL = 1.4826
# A deviation counts as at least this share of the loss, and this much of the logarithm of the gradient norm: on a very
# even stretch every step would be an outlier.
LOSS_SHARE = 0.01
LOG_NORM = 0.1


class SpikeStatistics(NamedTuple):
    """The last good steps."""

    # Newest last; filled from the right.
    good_QW: jax.Array
    # How many there are, at most W.
    filled: jax.Array


def first_window(config: GuardConfig) -> SpikeStatistics | None:
    """The one before the first step; None where `guard.spike_window` is 0."""
    return SpikeStatistics(jnp.zeros((2, config.spike_window)), jnp.int32(0)) if config.spike_window else None


def check_spike(
    window: SpikeStatistics | None, loss: jax.Array, grad_norm: jax.Array, config: GuardConfig
) -> tuple[jax.Array, SpikeStatistics | None]:
    """Whether a step may change the state, and the window for the next one.

    Until the window is full, and without one, a step is good if loss and norm are finite. Then each must also be at
    most median + `guard.spike_threshold` · deviation. What is low is never a spike.

    Args:
        window: of the good steps so far.
        loss: of the step.
        grad_norm: global norm of its gradient, before clipping.
        config: the section of the run's config.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if window is None:
        return finite, None
    good_QW, filled = window
    # Norms spread by factors, and a norm of 0 has no logarithm.
    level_Q = jnp.stack([loss, jnp.log(jnp.maximum(grad_norm, 1e-30))]).astype(good_QW.dtype)
    median_Q = jnp.median(good_QW, axis=1)
    deviation_Q = NORMAL * jnp.median(jnp.abs(good_QW - median_Q[:, None]), axis=1)
    least_Q = jnp.stack([LOSS_SHARE * jnp.abs(median_Q[0]), jnp.full_like(median_Q[1], LOG_NORM)])
    limit_Q = median_Q + config.spike_threshold * jnp.maximum(deviation_Q, least_Q)
    spike = (filled >= config.spike_window) & jnp.any(level_Q > limit_Q)
    ok = finite & ~spike
    moved_QW = jnp.concatenate([good_QW[:, 1:], level_Q[:, None]], axis=1)
    return ok, SpikeStatistics(
        jnp.where(ok, moved_QW, good_QW), jnp.where(ok, jnp.minimum(filled + 1, config.spike_window), filled)
    )


def window_to_json(window: SpikeStatistics) -> dict[str, list[float]]:
    """What a checkpoint keeps, oldest first; the numbers are exact."""
    good_QW, filled = jax.device_get(window)
    losses, log_grad_norms = good_QW[:, good_QW.shape[1] - int(filled) :].tolist()
    return {'losses': losses, 'log_grad_norms': log_grad_norms}


def window_from_json(stored: Mapping[str, Any] | None, config: GuardConfig) -> SpikeStatistics | None:
    """The window that `window_to_json` wrote, on the host; the newest part of it if `guard.spike_window` is smaller
    now.

    An older checkpoint has none: it starts anew.
    """
    if not config.spike_window:
        return None
    good_QW = np.zeros((2, config.spike_window), np.float32)
    filled = 0
    if stored is not None:
        newest_QW = np.array([stored['losses'], stored['log_grad_norms']], np.float32)[:, -config.spike_window :]
        filled = newest_QW.shape[1]
        good_QW[:, config.spike_window - filled :] = newest_QW
    return SpikeStatistics(jnp.asarray(good_QW), jnp.int32(filled))
