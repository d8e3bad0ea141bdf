"""The learning rate of every update."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlm.config.schema import OptimizerConfig


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of update n = 0, 1, …: linear warm-up from 0, then `config.schedule` until `num_steps`.

    Update `warmup_steps` has the peak rate, `num_steps` would have the minimum. In between falls a cosine (Loshchilov &
    Hutter 2017), a line, or with wsd first nothing and then a line (Hu et al. 2024, "MiniCPM"; Hägele et al. 2024,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations"). A decay that would begin within the
    warm-up begins at its end and is steeper; a run that is shorter than its warm-up stays in it.
    """
    peak, minimum, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    length = num_steps - warmup
    if config.schedule == 'constant' or length <= 0:
        after = optax.constant_schedule(peak)
    elif config.schedule == 'cosine':
        after = optax.cosine_decay_schedule(peak, length, alpha=minimum / peak)
    else:
        share = {'linear': 1.0, 'wsd': config.wsd_decay_fraction}[config.schedule]
        decay = min(max(1, round(share * num_steps)), length)
        after = optax.linear_schedule(peak, minimum, decay, transition_begin=length - decay)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


class Progress(NamedTuple):
    """Progress of a schedule whose length is decided during the run: a line from `share` at `step` to 1 at `num_steps`.

    Each new decision continues from the progress at that step, so the learning rate never jumps.
    """

    # Steps done when the length was decided last, and the share of the schedule that they were.
    step: Any
    share: Any
    # Steps of the whole run.
    num_steps: Any
    # Share of the schedule at the end of the warm-up.
    warmup: Any

    def at(self, step: Any) -> Any:
        """Returns the share of the schedule that is done after `step` steps, `self.step` or more."""
        return self.share + (1 - self.share) * (step - self.step) / (self.num_steps - self.step)


def rate_at(config: OptimizerConfig, progress: Progress, step: jax.Array) -> jax.Array:
    """Returns the learning rate of the update after `step` steps, as a float32 scalar.

    With progress from (step 0, share 0) this is `make_schedule`, for a length that need not be known when the step is
    compiled.

    Args:
        config: names the schedule.
        progress: float32 scalars.
        step: int32 scalar. Unlike the count of `make_schedule` it includes skipped steps, which take time too.
    """
    step = step.astype(jnp.float32)
    peak, minimum, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    start = jnp.float32(1.0) if config.schedule == 'constant' else progress.warmup
    if config.schedule == 'wsd':
        start = jnp.maximum(start, 1 - config.wsd_decay_fraction)
    fallen = jnp.clip((progress.at(step) - start) / jnp.maximum(1 - start, 1e-7), 0, 1)
    if config.schedule == 'cosine':
        fallen = (1 - jnp.cos(jnp.pi * fallen)) / 2
    rate = peak + (minimum - peak) * fallen
    return jnp.where(step < warmup, peak * step / max(warmup, 1), rate)
