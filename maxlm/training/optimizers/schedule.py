"""Learning rate schedules."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.user_function import call_function, is_function_name, load_function
from maxlm.errors import InputError

KEY = 'optimizer.schedule'


class Progress(NamedTuple):
    """Progress of a schedule whose length is decided during the run.

    It is a line from `fraction` at `step` to 1 at `num_steps`. Each new decision continues from the progress at that
    step, so the learning rate never jumps.

    Attributes:
        step: number of steps completed at the last decision of the length.
        fraction: fraction of the schedule completed at that step.
        num_steps: number of steps of the entire run.
        warmup: fraction of the schedule at the end of the warm-up.
    """

    step: Any
    fraction: Any
    num_steps: Any
    warmup: Any

    def at(self, step: Any) -> Any:
        """Returns the fraction of the schedule completed after `step` steps, with `step` ≥ `self.step`."""
        return self.fraction + (1 - self.fraction) * (step - self.step) / (self.num_steps - self.step)

    def position(self, step: Any, *, num_steps: int, warmup_steps: int) -> jax.Array:
        """Returns the update of a schedule of `num_steps` updates that corresponds to `step`, a float32 scalar.

        The warm-up keeps its number of updates. The remaining updates are stretched over the rest of the run.
        """
        after = (self.at(step) - self.warmup) / jnp.maximum(1 - self.warmup, 1e-7)
        stretched = warmup_steps + jnp.clip(after, 0, 1) * (num_steps - warmup_steps)
        return jnp.where(step < warmup_steps, step, stretched)


class RunFractions(NamedTuple):
    """Completed fractions by number of updates, each a schedule with values from 0 to 1.

    Attributes:
        run: completed fraction of the run.
        decay: completed fraction of the decay of the learning rate, which ends with the run. It is meaningless for
            schedules without a decay and for those of the user.
    """

    run: optax.Schedule
    decay: optax.Schedule


def make_run_fractions(config: OptimizerConfig, num_steps: int, progress: Progress | None = None) -> RunFractions:
    """Returns the completed fractions of a run, with the arguments of `make_schedule`.

    Examples:
        >>> config = OptimizerConfig(schedule='wsd', wsd_decay_fraction=0.5)
        >>> fractions = make_run_fractions(config, num_steps=8)
        >>> [(float(fractions.run(update)), float(fractions.decay(update))) for update in (0, 4, 6, 8)]
        [(0.0, 0.0), (0.5, 0.0), (0.75, 0.5), (1.0, 1.0)]
    """
    if progress is not None:
        return RunFractions(lambda step: jnp.clip(progress.at(step), 0, 1), partial(_decayed, config, progress))
    start = min(config.warmup_steps, num_steps)
    if config.schedule == 'wsd':
        start = num_steps - _decay_steps(config, num_steps)
    return RunFractions(
        optax.linear_schedule(0.0, 1.0, num_steps), optax.linear_schedule(0.0, 1.0, num_steps - start, start)
    )


def make_schedule(config: OptimizerConfig, num_steps: int, progress: Progress | None = None) -> optax.Schedule:
    """Returns the learning rate of update n = 0, 1, …: linear warm-up, then `config.schedule` until `num_steps`.

    The warm-up begins at 1 / `warmup_steps` of the peak, or with `warmup_from_zero` at 0. Update `warmup_steps` has
    the peak rate, and update `num_steps` would have the minimum rate. In between, the rate follows a cosine (Loshchilov
    & Hutter 2017), a line, or with wsd a constant and then a line (Hu et al. 2024, "MiniCPM"; Hägele et al. 2024,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations").

    A decay that would begin during the warm-up begins at its end and is steeper. A run shorter than its warm-up has no
    decay.

    Args:
        config: section `optimizer` of the config. A function of the user (`module:function`) receives this section and
            `num_steps`, and returns the schedule.
        num_steps: length of the run.
        progress: progress of a run whose length changes, as float32 scalars. The schedule then takes steps instead of
            updates, with skipped steps, which also take time.

    Raises:
        InputError: the function of the user cannot be imported, fails or does not return a schedule.

    Examples:
        >>> config = OptimizerConfig(schedule='linear', learning_rate=1.0, min_learning_rate=0.0, warmup_steps=2)
        >>> schedule = make_schedule(config, num_steps=6)
        >>> [round(float(schedule(update)), 4) for update in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    peak, minimum, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if is_function_name(config.schedule):
        schedule = _user_schedule(config, num_steps)
        if progress is None:
            return schedule
        return lambda step: schedule(progress.position(step, num_steps=num_steps, warmup_steps=warmup))
    if progress is not None:
        return partial(_rate_at, config, progress)
    length = num_steps - warmup
    if config.schedule == 'constant' or length <= 0:
        after = optax.constant_schedule(peak)
    elif config.schedule == 'cosine':
        after = optax.cosine_decay_schedule(peak, length, alpha=minimum / peak)
    else:
        decay = length if config.schedule == 'linear' else _decay_steps(config, num_steps)
        after = optax.linear_schedule(peak, minimum, decay, transition_begin=length - decay)
    if not warmup:
        return after
    rising = optax.linear_schedule(0.0, peak, warmup)
    first = rising if config.warmup_from_zero else lambda update: rising(update + 1)
    return optax.join_schedules([first, after], [warmup])


def _decay_steps(config: OptimizerConfig, num_steps: int) -> int:
    """Returns the number of steps of the decay of wsd, which begins after the warm-up."""
    length = max(0, num_steps - config.warmup_steps)
    return min(max(1, round(config.wsd_decay_fraction * num_steps)), length)


def _rate_at(config: OptimizerConfig, progress: Progress, step: Any) -> jax.Array:
    """Returns the learning rate of the update after `step` steps of a run whose length changes, a float32 scalar.

    The length need not be known when the step is compiled. If the progress starts at (step 0, share 0), the result
    equals that of a fixed length.
    """
    step = jnp.asarray(step, jnp.float32)
    peak, minimum, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    fallen = _decayed(config, progress, step)
    if config.schedule == 'cosine':
        fallen = (1 - jnp.cos(jnp.pi * fallen)) / 2
    rate = peak + (minimum - peak) * fallen
    risen = step if config.warmup_from_zero else step + 1
    return jnp.where(step < warmup, peak * risen / max(warmup, 1), rate)


def _decayed(config: OptimizerConfig, progress: Progress, step: Any) -> jax.Array:
    """Returns the completed fraction of the decay after `step` steps of a run whose length changes."""
    start = jnp.float32(1.0) if config.schedule == 'constant' else progress.warmup
    if config.schedule == 'wsd':
        start = jnp.maximum(start, 1 - config.wsd_decay_fraction)
    return jnp.clip((progress.at(step) - start) / jnp.maximum(1 - start, 1e-7), 0, 1)


def _user_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the schedule of a function of the user after a trace of it."""
    name = config.schedule
    function = load_function(name, kind=KEY, arguments=('config', 'num_steps'))
    schedule: optax.Schedule = call_function(function, config, num_steps, name=name, kind=KEY)
    if not callable(schedule):
        raise InputError(
            f'{KEY} {name}: returned {type(schedule).__name__}; it must return a schedule, which is a function of the '
            'number of updates, such as optax.cosine_decay_schedule(…)'
        )
    # The position in a run whose length changes is a float.
    for dtype in (jnp.int32, jnp.float32):
        count = jax.ShapeDtypeStruct((), dtype)
        rate = call_function(jax.eval_shape, schedule, count, name=name, kind=KEY)
        if getattr(rate, 'shape', None) != () or not jnp.issubdtype(rate.dtype, jnp.floating):
            raise InputError(f'{KEY} {name}: the schedule returned {rate}; it must return a float scalar')
    return schedule
