"""Learning rate schedules."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlm.config.sections.optimizer import OptimizerConfig


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate of update n = 0, 1, …: linear warm-up from 0, then `config.schedule` until `num_steps`.

    Update `warmup_steps` has the peak rate, and update `num_steps` would have the minimum rate. In between, the rate
    follows a cosine (Loshchilov & Hutter 2017), a line, or with wsd a constant and then a line (Hu et al. 2024,
    "MiniCPM"; Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations").

    A decay that would begin during the warm-up begins at its end and is steeper. A run shorter than its warm-up has no
    decay.

    Examples:
        >>> config = OptimizerConfig(schedule='linear', learning_rate=1.0, min_learning_rate=0.0, warmup_steps=2)
        >>> schedule = make_schedule(config, num_steps=6)
        >>> [float(schedule(update)) for update in range(7)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
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

    Attributes:
        step: number of steps completed at the last decision of the length.
        share: share of the schedule completed at that step.
        num_steps: number of steps of the entire run.
        warmup: share of the schedule at the end of the warm-up.
    """

    step: Any
    share: Any
    num_steps: Any
    warmup: Any

    def at(self, step: Any) -> Any:
        """Returns the share of the schedule completed after `step` steps, with `step` ≥ `self.step`."""
        return self.share + (1 - self.share) * (step - self.step) / (self.num_steps - self.step)


def rate_at(config: OptimizerConfig, progress: Progress, step: jax.Array) -> jax.Array:
    """Returns the learning rate of the update after `step` steps, as a float32 scalar.

    If the progress starts at (step 0, share 0), the result equals `make_schedule`, but the length need not be known
    when the step is compiled.

    Args:
        config: section `optimizer` of the config.
        progress: progress as float32 scalars.
        step: int32 scalar. Unlike the count of `make_schedule` it includes skipped steps, which also take time.
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
