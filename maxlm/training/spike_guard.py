"""Spike detection: skips steps whose loss or gradient norm is not finite or far above that of recent good steps.

Limits are based on the median and the median absolute deviation, which are robust to single outliers (Huber & Ronchetti
2009, "Robust Statistics"). Only good steps enter the window, so a spike never raises the limit for the next step.
Steps whose gradient is 0, such as those of batches without targets, do not enter it, because they show no usual norm.

Detection begins after `MIN_SPIKE_WINDOW` good steps. Until the window is full, two rules differ:

- The limit follows from the newest half of the steps, at least `MIN_SPIKE_WINDOW`, because the loss of a young run
  falls fast. The deviation of n steps is less certain than that of the W steps of a full window. The threshold is
  therefore multiplied by `1 + SMALL * (1/n - 1/W)`. The tests simulate false alarms with W = 128. They are no more
  frequent than with a full window if the noise is normal, Laplace, or Student's t with 4 or 6 degrees of freedom.
- Each spike halves the window. After a few spikes in a row the guard is thus inactive, and the next step changes the
  parameters. In a young run it is often the parameters that cause the spike, not the batch, and an update repairs them
  (Bai et al. 2025, "Adaptive Preconditioners Trigger Loss Spikes in Adam"). Skipped steps would repeat the spike.

Shapes: Q quantities (loss, logarithm of the gradient norm), W steps of the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.sections.optimizer import GuardConfig
from maxlm.config.validation import MIN_SPIKE_WINDOW

# Standard deviation of a normal distribution, divided by its median absolute deviation.
NORMAL = 1.4826
# Smallest deviations: a fraction of the median loss, and an absolute value for the logarithm of the gradient norm.
# Without them, every step after a very even window would be an outlier.
LOSS_FRACTION = 0.01
LOG_NORM = 0.1
# Correction of the threshold for n steps instead of the whole window: 1 + SMALL · (1/n - 1/W).
SMALL = 16


class SpikeStatistics(NamedTuple):
    """Window of the last good steps.

    Attributes:
        good_QW: loss and log gradient norm of each step, newest last; filled from the right.
        filled: number of steps in the window, at most W.
    """

    good_QW: jax.Array
    filled: jax.Array


def first_spike_window(config: GuardConfig) -> SpikeStatistics | None:
    """Returns the empty window before the first step; None if `guard.spike_window` is 0."""
    return SpikeStatistics(jnp.zeros((2, config.spike_window)), jnp.int32(0)) if config.spike_window else None


def check_spike(
    spike_window: SpikeStatistics | None, loss: jax.Array, grad_norm: jax.Array, config: GuardConfig
) -> tuple[jax.Array, SpikeStatistics | None]:
    """Checks the loss and gradient norm of a step for spikes.

    Without a window, or with less than `MIN_SPIKE_WINDOW` steps in it, a step is good if its loss and norm are finite.
    Afterwards both must also be at most median + `guard.spike_threshold` · deviation, with the correction for small
    windows. Low values are never spikes.

    Args:
        spike_window: statistics of the previous good steps.
        loss: loss of the step.
        grad_norm: global norm of the gradient before clipping.
        config: section `guard` of the config.

    Returns:
        A boolean scalar, True if the step may change the state, and the window for the next step.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if spike_window is None:
        return finite, None
    good_QW, filled = spike_window
    # The logarithm is used because norms vary by factors. The lower bound avoids log(0).
    level_Q = jnp.stack([loss, jnp.log(jnp.maximum(grad_norm, 1e-30))]).astype(good_QW.dtype)
    W = config.spike_window
    is_full = filled == W
    used = jnp.where(is_full, W, jnp.maximum(filled // 2, MIN_SPIKE_WINDOW))
    used_QW = jnp.where(jnp.arange(W) >= W - used, good_QW, jnp.nan)
    median_Q = jnp.nanmedian(used_QW, axis=1)
    deviation_Q = NORMAL * jnp.nanmedian(jnp.abs(used_QW - median_Q[:, None]), axis=1)
    least_Q = jnp.stack([LOSS_FRACTION * jnp.abs(median_Q[0]), jnp.full_like(median_Q[1], LOG_NORM)])
    threshold = config.spike_threshold * (1 + SMALL * (1 / used - 1 / W))
    limit_Q = median_Q + threshold * jnp.maximum(deviation_Q, least_Q)
    spike = (filled >= MIN_SPIKE_WINDOW) & jnp.any(level_Q > limit_Q)
    ok = finite & ~spike
    moved_QW = jnp.concatenate([good_QW[:, 1:], level_Q[:, None]], axis=1)
    kept = jnp.where(finite & ~is_full, filled // 2, filled)
    enters = ok & (grad_norm > 0)
    counted = jnp.where(ok, filled, kept)
    return ok, SpikeStatistics(
        jnp.where(enters, moved_QW, good_QW), jnp.where(enters, jnp.minimum(filled + 1, W), counted)
    )


def spike_window_to_json(spike_window: SpikeStatistics) -> dict[str, list[float]]:
    """Returns the window as JSON values for a checkpoint, oldest step first. The conversion is exact."""
    good_QW, filled = jax.device_get(spike_window)
    losses, log_grad_norms = good_QW[:, good_QW.shape[1] - int(filled) :].tolist()
    return {'losses': losses, 'log_grad_norms': log_grad_norms}


def spike_window_from_json(stored: Mapping[str, Any] | None, config: GuardConfig) -> SpikeStatistics | None:
    """Returns the window written by `spike_window_to_json`, in host memory.

    If `guard.spike_window` is now smaller, only the newest steps are kept. Checkpoints of older versions have no
    window, so the window is then empty.
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
