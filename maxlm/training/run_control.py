"""What a run decides on its way, as pure functions of numbers: going back, stopping early, ending with its budget.

Decisions go with every checkpoint, so that a run which starts again decides no other way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.config.schema import Config, GuardConfig

# From this share of a budget on there is an alert.
ALERT_SHARE = 0.8


class RunControl(NamedTuple):
    """All that a run has decided so far."""

    # Ranges [start, stop) of batches of the data's own order that the run leaves out; see
    # `maxlm.data.loader.skipped_batches`.
    skips: tuple[tuple[int, int], ...] = ()
    # Times that the run went back to a checkpoint.
    rollbacks: int = 0
    # What the config's learning rates are multiplied by.
    rate_factor: float = 1.0
    # Length of the run where train.hours or train.dollars gives it, as decided last; 0 = not decided, or the config's.
    num_steps: int = 0
    # What the run has cost in all of its lives, and how much of the time went into steps.
    hours: float = 0.0
    dollars: float = 0.0
    step_hours: float = 0.0
    # For early stopping.
    best_validation_loss: float = math.inf
    evaluations_without_progress: int = 0
    # Where num_steps is decided: steps done at the last decision, the share of the schedule that they were and the
    # share that the warm-up was (see `maxlm.training.optimizers.schedule.Progress`).
    planned_step: int = 0
    planned_share: float = 0.0
    warmup_share: float = 0.0
    # The budget that it was decided for, and the duration of a step; 0 = not measured.
    budget: float = 0.0
    step_seconds: float = 0.0


class BadSteps(NamedTuple):
    """The run's last steps, as far as they were left out one after the other; numbers count from 1."""

    first: int = 0
    last: int = 0
    # How many; steps in between whose gradient overflowed in float16 do not count.
    in_a_row: int = 0


class Rollback(NamedTuple):
    """Go on from the checkpoint of step `step` (0 = from the start), without some batches."""

    step: int
    # The batches of the steps after `skip_from` up to `skip_to`, as the run numbers them before it goes back.
    skip_from: int
    skip_to: int


class Stop(NamedTuple):
    """End the run."""

    reason: str


def on_bad_steps(decisions: RunControl, bad: BadSteps, saved: Sequence[int], config: Config) -> Rollback | Stop | None:
    """What follows from steps that were left out; None = nothing yet.

    The batches of `guard.rollback_skip_steps` steps before the first bad one are left out too: often they are what did
    it. The checkpoint is the newest that has seen none of them. If there is only a younger one, which has seen the
    first of them, the rest is left out; one that is younger than the first bad step is no good.

    Args:
        decisions: those of the run so far.
        bad: its newest bad steps.
        saved: steps of the checkpoints that can be restored; with 0 if the run can start anew.
        config: of the run.
    """
    guard, most = config.guard, config.guard.max_consecutive_skips
    if bad.in_a_row < most:
        return None
    where = (
        f'steps {bad.first} to {bad.last}: {bad.in_a_row} in a row had a loss or gradient that spikes or is not finite '
        f'(guard.max_consecutive_skips)'
    )
    advice = (
        'try a lower optimizer.learning_rate, and look at the data; where batches differ that much by nature, raise '
        'guard.spike_threshold'
    )
    if decisions.rollbacks >= guard.max_rollbacks:
        tried = f', after {decisions.rollbacks} rollback(s) (guard.max_rollbacks)' if decisions.rollbacks else ''
        return Stop(f'{where}{tried}; {advice}')
    before = bad.first - 1
    wanted = max(0, before - guard.rollback_skip_steps)
    good = [step for step in saved if step <= before]
    if not good:
        return Stop(f'{where}, and no checkpoint is older; {advice}')
    step = max((step for step in good if step <= wanted), default=min(good))
    return Rollback(step, max(step, wanted), bad.last)


def rolled_back(
    now: RunControl, restored: RunControl, skips: tuple[tuple[int, int], ...], guard: GuardConfig
) -> RunControl:
    """Those after a rollback.

    Args:
        now: from before it: what was spent is spent.
        restored: of the checkpoint, whose evaluations are the last that count, and whose schedule continues.
        skips: with the batches of the rollback.
        guard: the section of the run's config.
    """
    return now._replace(
        skips=skips,
        rollbacks=now.rollbacks + 1,
        rate_factor=now.rate_factor * guard.rollback_lr_factor,
        best_validation_loss=restored.best_validation_loss,
        evaluations_without_progress=restored.evaluations_without_progress,
        num_steps=restored.num_steps,
        planned_step=restored.planned_step,
        planned_share=restored.planned_share,
        warmup_share=restored.warmup_share,
    )


def apply_control(config: Config, decisions: RunControl) -> Config:
    """A resolved config with the length and the learning rates that the run has decided on."""
    config = with_rates(config, decisions)
    if not (config.by_budget and decisions.num_steps):
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=decisions.num_steps))


def with_rates(config: Config, decisions: RunControl) -> Config:
    """A resolved config with the learning rates alone: the step is compiled for it, whatever its budget comes to."""
    optimizer = config.optimizer
    if decisions.rate_factor != 1:
        # 0 stands for another of them, and stays 0.
        optimizer = dataclasses.replace(
            optimizer,
            learning_rate=decisions.rate_factor * optimizer.learning_rate,
            adam_learning_rate=decisions.rate_factor * optimizer.adam_learning_rate,
            embedding_learning_rate=decisions.rate_factor * optimizer.embedding_learning_rate,
            min_learning_rate=decisions.rate_factor * optimizer.min_learning_rate,
        )
    return dataclasses.replace(config, optimizer=optimizer)


def after_evaluation(decisions: RunControl, validation_loss: float, guard: GuardConfig) -> RunControl:
    """With one more evaluation. A loss that is not finite is no progress."""
    if validation_loss < decisions.best_validation_loss - guard.early_stopping_min_delta:
        return decisions._replace(best_validation_loss=validation_loss, evaluations_without_progress=0)
    return decisions._replace(evaluations_without_progress=decisions.evaluations_without_progress + 1)


def stops_early(decisions: RunControl, guard: GuardConfig) -> Stop | None:
    """Whether validation has told for long enough that there is no more progress."""
    if not guard.early_stopping_patience or decisions.evaluations_without_progress < guard.early_stopping_patience:
        return None
    return Stop(
        f'the validation loss has not gone below {decisions.best_validation_loss:.4f} by more than '
        f'{guard.early_stopping_min_delta:g} '
        f'in {decisions.evaluations_without_progress} evaluations (guard.early_stopping_patience)'
    )


def spend(
    decisions: RunControl, seconds: float, *, step_seconds: float = 0.0, num_devices: int, price_per_hour: float
) -> RunControl:
    """With so many more seconds of all devices, `step_seconds` of them in steps; the price is of one device."""
    hours = seconds / 3600
    return decisions._replace(
        hours=decisions.hours + hours,
        dollars=decisions.dollars + hours * num_devices * price_per_hour,
        step_hours=decisions.step_hours + step_seconds / 3600,
    )


class Budget(NamedTuple):
    """How much of the nearest budget is spent, and its key and value."""

    share: float
    name: str

    @property
    def alert(self) -> bool:
        """There is not much left."""
        return self.share >= ALERT_SHARE

    @property
    def used_up(self) -> bool:
        return self.share >= 1


def budget_spent(decisions: RunControl, config: Config) -> Budget | None:
    """The budget of which most is spent; None = there is none."""
    train, guard = config.train, config.guard
    spent = {
        'train.hours': (decisions.hours, train.hours),
        'train.dollars': (decisions.dollars, train.dollars),
        'guard.max_hours': (decisions.hours, guard.max_hours),
        'guard.max_dollars': (decisions.dollars, guard.max_dollars),
    }
    budgets = [Budget(used / limit, f'{key}={limit:g}') for key, (used, limit) in spent.items() if limit]
    return max(budgets, default=None)


def seconds_left(decisions: RunControl, config: Config, num_devices: int) -> float | None:
    """Until the next budget is used up, or until there is to be an alert; None = there is no budget."""
    train, guard = config.train, config.guard
    rate = num_devices * train.price_per_hour
    limits = [(decisions.hours, limit) for limit in (train.hours, guard.max_hours) if limit]
    limits += [(decisions.dollars / rate, limit / rate) for limit in (train.dollars, guard.max_dollars) if limit]
    if not limits:
        return None
    hours = [share * limit - spent for spent, limit in limits for share in (ALERT_SHARE, 1.0)]
    return 3600 * min((left for left in hours if left > 0), default=0.0)


def ended(config: Config, decisions: RunControl, step: int) -> str:
    """Why a run that has done `step` steps is over, whatever comes; '' = it is not."""
    num_steps = apply_control(config, decisions).train.num_steps
    if step >= num_steps:
        return f'step {step} of {num_steps} is done'
    budget = budget_spent(decisions, config)
    if budget and budget.used_up:
        return f'{budget.name} is used up'
    stop = stops_early(decisions, config.guard)
    return stop.reason if stop else ''


def to_json(decisions: RunControl) -> dict[str, Any]:
    """What a checkpoint keeps."""
    values = decisions._asdict()
    # JSON has no infinity.
    best = decisions.best_validation_loss
    return {**values, 'best_validation_loss': best if math.isfinite(best) else None}


def from_json(stored: Mapping[str, Any] | None) -> RunControl:
    """The decisions that `to_json` wrote; those of a new run where an older checkpoint has none."""
    if stored is None:
        return RunControl()
    best = stored['best_validation_loss']
    return RunControl(
        **{
            **stored,
            'skips': tuple((start, stop) for start, stop in stored['skips']),
            'best_validation_loss': math.inf if best is None else best,
        }
    )
