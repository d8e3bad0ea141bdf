"""Decisions of a run as pure functions of numbers: rollback, early stopping, and the end of its budget.

Every checkpoint contains the decisions, so a resumed run makes the same ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.config.schema import Config
from maxlm.config.sections.optimizer import GuardConfig
from maxlm.config.validation_optimizer import scale_group_rates
from maxlm.formatting import plural

# Share of a budget from which an alert is sent.
ALERT_FRACTION = 0.8


class RunControl(NamedTuple):
    """All decisions of a run so far.

    Attributes:
        skips: ranges [start, stop) of batches, in the original order of the data, that the run skips; see
            `maxlm.data.loader.skipped_batches`.
        rollbacks: number of rollbacks to a checkpoint.
        rate_factor: factor of the config's learning rates.
        num_steps: last decided length if `train.hours` or `train.dollars` gives it. 0 means that it is not decided
            yet, or that the config gives it.
        hours: hours spent in all attempts.
        dollars: dollars spent in all attempts.
        step_hours: the part of `hours` spent in training steps.
        best_validation_loss: lowest validation loss, for early stopping.
        evaluations_without_progress: number of evaluations since that loss improved.
        planned_step: steps completed at the last decision of `num_steps`.
        planned_share: fraction of the schedule completed at that step; see
            `maxlm.training.optimizers.schedule.Progress`.
        warmup_share: fraction of the schedule at the end of the warm-up.
        budget: budget for which `num_steps` was decided.
        step_seconds: duration of a step; 0 means not measured.
        batch_sizes: sizes of the global batch; see `maxlm.data.loader.batch_rows.Changes`.
    """

    skips: tuple[tuple[int, int], ...] = ()
    rollbacks: int = 0
    rate_factor: float = 1.0
    num_steps: int = 0
    hours: float = 0.0
    dollars: float = 0.0
    step_hours: float = 0.0
    best_validation_loss: float = math.inf
    evaluations_without_progress: int = 0
    planned_step: int = 0
    planned_share: float = 0.0
    warmup_share: float = 0.0
    budget: float = 0.0
    step_seconds: float = 0.0
    batch_sizes: tuple[tuple[int, int, int], ...] = ()


class BadSteps(NamedTuple):
    """The most recent consecutive skipped steps, counted from 1.

    Attributes:
        first: number of the first skipped step.
        last: number of the last skipped step.
        in_a_row: number of skipped steps, without steps in between whose gradient overflowed in float16.
    """

    first: int = 0
    last: int = 0
    in_a_row: int = 0


class Rollback(NamedTuple):
    """Decision to continue from an earlier checkpoint and to skip some batches.

    Attributes:
        step: step of the checkpoint; 0 means the start of the run.
        skip_from: the batches of the steps after this step are skipped, in the numbering before the rollback.
        skip_to: the last step whose batch is skipped.
    """

    step: int
    skip_from: int
    skip_to: int


class Stop(NamedTuple):
    """Decision to stop the run."""

    reason: str


def on_bad_steps(decisions: RunControl, bad: BadSteps, saved: Sequence[int], config: Config) -> Rollback | Stop | None:
    """Decides between rollback and stop after skipped steps. Returns None if there are too few of them.

    A rollback also skips the batches of the `guard.rollback_skip_steps` steps before the first bad step, because they
    often caused the spike. It restores the newest checkpoint that was trained on none of the skipped batches. If every
    checkpoint before the first bad step was trained on some of them, it restores the oldest of these checkpoints and
    skips only the batches after it. Without a checkpoint before the first bad step, the run stops. Checkpoints from
    before a change of the batch size are not restored, because skipped batches are counted in batches of one size.

    Args:
        decisions: current decisions of the run.
        bad: most recent bad steps.
        saved: steps of the checkpoints that can be restored; includes 0 if the run can restart from the beginning.
        config: config of the run.
    """
    guard, most = config.guard, config.guard.max_consecutive_skips
    if bad.in_a_row < most:
        return None
    where = (
        f'steps {bad.first} to {bad.last}: {bad.in_a_row} consecutive steps had a loss or gradient norm that spiked or '
        f'was not finite (guard.max_consecutive_skips)'
    )
    advice = (
        'lower optimizer.learning_rate and check the data; if such differences between batches are expected, raise '
        'guard.spike_threshold'
    )
    if decisions.rollbacks >= guard.max_rollbacks:
        tried = (
            f', after {plural(decisions.rollbacks, "rollback")} (guard.max_rollbacks)' if decisions.rollbacks else ''
        )
        return Stop(f'{where}{tried}; {advice}')
    before = bad.first - 1
    target = max(0, before - guard.rollback_skip_steps)
    earliest = decisions.batch_sizes[-1][0] if decisions.batch_sizes else 0
    good = [step for step in saved if earliest <= step <= before]
    if not good:
        return Stop(f'{where}, and there is no older checkpoint; {advice}')
    step = max((step for step in good if step <= target), default=min(good))
    return Rollback(step, max(step, target), bad.last)


def rolled_back(
    now: RunControl, restored: RunControl, skips: tuple[tuple[int, int], ...], guard: GuardConfig
) -> RunControl:
    """Returns the decisions after a rollback.

    Args:
        now: decisions before the rollback; their costs, rollback count and rate factor are kept.
        restored: decisions of the checkpoint; their evaluations, schedule and batch sizes are restored.
        skips: ranges to skip, including the batches of this rollback.
        guard: section `guard` of the config.
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
        batch_sizes=restored.batch_sizes,
    )


def apply_control(config: Config, decisions: RunControl) -> Config:
    """Returns a resolved config with the length and the learning rates decided by the run."""
    config = with_rates(config, decisions)
    if not (config.by_budget and decisions.num_steps):
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=decisions.num_steps))


def with_rates(config: Config, decisions: RunControl) -> Config:
    """Returns a resolved config with the decided learning rates but the original length.

    The step is compiled for this config, so a new length does not cause a recompilation.
    """
    optimizer = config.optimizer
    if decisions.rate_factor != 1:
        # A rate of 0 means that another rate is used. It remains 0.
        optimizer = dataclasses.replace(
            optimizer,
            learning_rate=decisions.rate_factor * optimizer.learning_rate,
            adam_learning_rate=decisions.rate_factor * optimizer.adam_learning_rate,
            embedding_learning_rate=decisions.rate_factor * optimizer.embedding_learning_rate,
            min_learning_rate=decisions.rate_factor * optimizer.min_learning_rate,
            groups=scale_group_rates(optimizer.groups, decisions.rate_factor),
        )
    return dataclasses.replace(config, optimizer=optimizer)


def after_evaluation(decisions: RunControl, validation_loss: float, guard: GuardConfig) -> RunControl:
    """Returns the decisions after one more evaluation. A non-finite loss is not an improvement."""
    if validation_loss < decisions.best_validation_loss - guard.early_stopping_min_delta:
        return decisions._replace(best_validation_loss=validation_loss, evaluations_without_progress=0)
    return decisions._replace(evaluations_without_progress=decisions.evaluations_without_progress + 1)


def stops_early(decisions: RunControl, guard: GuardConfig) -> Stop | None:
    """Returns a `Stop` if the validation loss has not improved in `guard.early_stopping_patience` evaluations."""
    if not guard.early_stopping_patience or decisions.evaluations_without_progress < guard.early_stopping_patience:
        return None
    return Stop(
        f'the validation loss has not improved on {decisions.best_validation_loss:.4f} by more than '
        f'{guard.early_stopping_min_delta:g} in {decisions.evaluations_without_progress} evaluations '
        '(guard.early_stopping_patience)'
    )


def spend(
    decisions: RunControl, seconds: float, *, step_seconds: float = 0.0, num_devices: int, price_per_hour: float
) -> RunControl:
    """Adds the cost of `seconds` seconds on all devices, of which `step_seconds` were spent in training steps.

    `price_per_hour` is the price of one device.
    """
    hours = seconds / 3600
    return decisions._replace(
        hours=decisions.hours + hours,
        dollars=decisions.dollars + hours * num_devices * price_per_hour,
        step_hours=decisions.step_hours + step_seconds / 3600,
    )


class Budget(NamedTuple):
    """Use of a budget.

    Attributes:
        fraction: spent fraction of the budget.
        name: config key and value of the budget.
    """

    fraction: float
    name: str

    @property
    def alert(self) -> bool:
        """Returns True if the spent fraction requires an alert."""
        return self.fraction >= ALERT_FRACTION

    @property
    def used_up(self) -> bool:
        return self.fraction >= 1


def budget_spent(decisions: RunControl, config: Config) -> Budget | None:
    """Returns the budget with the largest spent fraction; None if the config has no budget."""
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
    """Returns the seconds until the next budget alert or until a budget is used up; None if there is no budget."""
    train, guard = config.train, config.guard
    rate = num_devices * train.price_per_hour
    limits = [(decisions.hours, limit) for limit in (train.hours, guard.max_hours) if limit]
    limits += [(decisions.dollars / rate, limit / rate) for limit in (train.dollars, guard.max_dollars) if limit]
    if not limits:
        return None
    hours = [fraction * limit - spent for spent, limit in limits for fraction in (ALERT_FRACTION, 1.0)]
    return 3600 * min((left for left in hours if left > 0), default=0.0)


def ended(config: Config, decisions: RunControl, step: int) -> str:
    """Returns the reason why a run is finished after `step` steps; '' if it is not finished."""
    num_steps = apply_control(config, decisions).train.num_steps
    if step >= num_steps:
        return f'step {step} of {num_steps} is done'
    budget = budget_spent(decisions, config)
    if budget and budget.used_up:
        return f'{budget.name} is used up'
    stop = stops_early(decisions, config.guard)
    return stop.reason if stop else ''


def to_json(decisions: RunControl) -> dict[str, Any]:
    """Returns the decisions as JSON values for a checkpoint."""
    values = decisions._asdict()
    # JSON has no infinity.
    best = decisions.best_validation_loss
    return {**values, 'best_validation_loss': best if math.isfinite(best) else None}


def from_json(stored: Mapping[str, Any] | None) -> RunControl:
    """Returns the decisions written by `to_json`; those of a new run if `stored` is None (older checkpoints)."""
    if stored is None:
        return RunControl()
    best = stored['best_validation_loss']
    return RunControl(
        **{
            **stored,
            'skips': tuple((start, stop) for start, stop in stored['skips']),
            'best_validation_loss': math.inf if best is None else best,
            'batch_sizes': tuple(map(tuple, stored.get('batch_sizes', ()))),
        }
    )
