"""Compares the learning rates of a run before and after a change of its config."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.config.serialization import flatten
from maxlm.errors import InputError
from maxlm.training.decisions.run_control import RunControl, with_rates
from maxlm.training.decisions.run_length import progress_of
from maxlm.training.optimizers.schedule import Progress, make_schedule

# Keys of the config that determine the learning rate of a step.
SCHEDULE_KEYS = (
    *(f'train.{key}' for key in ('num_steps', 'hours', 'dollars')),
    *(f'optimizer.{key}' for key in ('schedule', 'learning_rate', 'adam_learning_rate', 'embedding_learning_rate')),
    *(f'optimizer.{key}' for key in ('min_learning_rate', 'warmup_steps', 'warmup_from_zero', 'wsd_decay_fraction')),
)


def schedule_change(
    old: Config, config: Config, *, before: RunControl, now: RunControl, step: int, skipped: int
) -> tuple[str, float | None, float] | None:
    """Returns a log line if a config changes the schedule of a run, and both learning rates.

    The first rate is None if a function of the user computed it and no longer exists.

    Args:
        old: resolved config of the previous attempt.
        config: resolved config of this attempt.
        before: decisions in the checkpoint.
        now: decisions adapted to the config.
        step: number of completed steps.
        skipped: number of them that were skipped.
    """
    values = {key: (flatten(old)[key], flatten(config)[key]) for key in SCHEDULE_KEYS}
    if config.by_budget or old.by_budget:
        # The length follows from the budget, which is named.
        del values['train.num_steps']
    changes = [f'{key} was {one} and is {two}' for key, (one, two) in values.items() if one != two]
    if not changes:
        return None
    first, second = None, learning_rate(config, now, step, skipped)
    with contextlib.suppress(InputError):
        first = learning_rate(old, before, step, skipped)
    was = '' if first is None else f'was {first:.3g} and '
    return f'{"; ".join(changes)}: the learning rate of step {step + 1} {was}is {second:.3g}', first, second


def learning_rate(config: Config, decisions: RunControl, step: int, skipped: int) -> float:
    """Returns the learning rate after `step` steps, of which `skipped` were skipped, of a resolved config."""
    optimizer = with_rates(config, decisions).optimizer
    progress = Progress(*map(jnp.float32, progress_of(decisions, config))) if config.by_budget else None
    schedule = make_schedule(optimizer, config.train.num_steps, progress)
    return float(jnp.asarray(schedule(step - (0 if config.by_budget else skipped))))
