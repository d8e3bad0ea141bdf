"""Computes the number of steps of a run whose length is given in hours or dollars.

The length is recomputed during the run. Each decision continues from the current progress of the schedule, so the
learning rate never jumps. It reaches its minimum when the budget is spent, even if the throughput changes.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.schema import UNDECIDED_STEPS, Config
from maxlm.training.decisions.run_control import RunControl, apply_control
from maxlm.training.optimizers.schedule import Progress

# Steps at the start of a process that are not measured: they are slower (caches, connections).
UNMEASURED_STEPS = 5
# Number of measured steps before the first decision; fewer if they take this fraction of the budget.
MEASURED_STEPS = 20
MEASURED_FRACTION = 0.02
# Number of measured steps of later decisions: the smallest one, and the fraction of all steps.
FEWEST_STEPS = 4
RECENT_FRACTION = 0.01
# Fraction of the budget reserved for unpredictable costs.
RESERVE = 0.01
# The length changes only if the new one differs by more than this fraction of the remaining steps.
TOLERANCE = 0.02
# The longest time between two decisions, as fractions of the budget and of the remaining time.
BUDGET_FRACTION = 0.005
REMAINING_FRACTION = 0.1


class Costs(NamedTuple):
    """Expected durations of the parts of a run, in seconds.

    Attributes:
        step: one training step.
        evaluation: one evaluation of the validation loss.
        tasks: one evaluation of the benchmarks in `eval.tasks`.
        save: time for which one save blocks training.
        last_save: time until the last checkpoint is stored.
    """

    step: float
    evaluation: float = 0.0
    tasks: float = 0.0
    save: float = 0.0
    last_save: float = 0.0


def budget_seconds(config: Config, num_devices: int) -> float:
    """Returns the budget `train.hours` or `train.dollars` in seconds of wall-clock time on `num_devices` devices."""
    train = config.train
    return 3600 * (train.hours or train.dollars / (num_devices * train.price_per_hour))


def budget_left(decisions: RunControl, config: Config, num_devices: int) -> float:
    """Returns the seconds until the budget `train.hours` or `train.dollars` is spent."""
    train = config.train
    if train.hours:
        return 3600 * (train.hours - decisions.hours)
    return 3600 * (train.dollars - decisions.dollars) / (num_devices * train.price_per_hour)


def seconds_until(num_steps: int, *, step: int, costs: Costs, config: Config) -> float:
    """Returns the expected seconds from the end of step `step` until the last checkpoint of `num_steps` is stored."""
    steps = num_steps - step

    def times(every: int) -> int:
        """Returns the number of multiples of `every` between `step` and `num_steps`, both excluded."""
        return (num_steps - 1) // every - step // every if every else 0

    evaluation, checkpoint = config.eval, config.checkpoint
    saves = times(checkpoint.save_interval_steps) + times(checkpoint.keep_period)
    if checkpoint.save_interval_minutes:
        saves += int(steps * costs.step / (60 * checkpoint.save_interval_minutes))
    seconds = steps * costs.step + saves * costs.save + max(costs.save, costs.last_save)
    if evaluation.interval:
        seconds += (times(evaluation.interval) + 1) * costs.evaluation
    if evaluation.tasks_interval:
        seconds += (times(evaluation.tasks_interval) + 1) * costs.tasks
    return seconds


def decide_length(decisions: RunControl, *, step: int, costs: Costs, num_devices: int, config: Config) -> RunControl:
    """Returns the decisions with the largest number of steps that fits the remaining budget, at least one more step.

    Args:
        decisions: current decisions, including the time and money spent.
        step: number of completed steps, less than the length decided before.
        costs: expected costs of the remaining steps. All processes must pass the same values.
        num_devices: number of devices of the run.
        config: config of a run with `train.hours` or `train.dollars`.
    """
    left = budget_left(decisions, config, num_devices) - RESERVE * budget_seconds(config, num_devices)
    low, high = step + 1, step + 1 + max(0, int(left / max(costs.step, 1e-9)))
    high = min(high, UNDECIDED_STEPS - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if seconds_until(middle, step=step, costs=costs, config=config) <= left:
            low = middle
        else:
            high = middle - 1
    rest = low - step
    # One step more is within the precision of the measurement, but one step less may be necessary.
    if decisions.num_steps and -TOLERANCE * rest <= low - decisions.num_steps <= max(1, TOLERANCE * rest):
        return decisions
    before = progress_of(decisions, config)
    return decisions._replace(
        num_steps=low, planned_step=step, planned_share=before.at(step), warmup_share=before.warmup
    )


def measured_steps(decisions: RunControl, step: int) -> int:
    """Returns the number of recent steps whose mean duration predicts the remaining steps.

    It decreases with the number of remaining steps.
    """
    if not decisions.num_steps:
        return MEASURED_STEPS
    most = max(MEASURED_STEPS, int(RECENT_FRACTION * decisions.num_steps))
    return max(FEWEST_STEPS, min(most, decisions.num_steps - step))


def next_decision(step: int, *, seconds_left: float, step_seconds: float, config: Config, num_devices: int) -> int:
    """Returns the step after which the length must be decided again."""
    seconds = min(BUDGET_FRACTION * budget_seconds(config, num_devices), REMAINING_FRACTION * seconds_left)
    return step + max(1, int(seconds / max(step_seconds, 1e-9)))


def progress_of(decisions: RunControl, config: Config) -> Progress:
    """Returns the schedule progress of a run with `train.hours` or `train.dollars`."""
    num_steps, warmup = apply_control(config, decisions).train.num_steps, config.optimizer.warmup_steps
    line = Progress(decisions.planned_step, decisions.planned_share, num_steps, decisions.warmup_share)
    if decisions.planned_step <= warmup:
        # The warm-up is given in steps, so each decision during the warm-up changes its fraction.
        line = line._replace(warmup=line.at(warmup))
    return line


def at_start(decisions: RunControl, config: Config, step: int) -> RunControl:
    """Returns the decisions of a restored checkpoint, adapted to the run length in `config`.

    If the budget changed, the schedule is stretched over the new budget, as after a change of `train.num_steps`.
    Its progress is then the fraction of the new budget that is spent, and the length is decided after the next step.
    """
    if not config.by_budget:
        return decisions._replace(num_steps=0, budget=0.0)
    budget = config.train.hours or config.train.dollars
    # Checkpoints of older versions have a length and no budget.
    if decisions.budget == budget or not step or (decisions.num_steps and not decisions.budget):
        return decisions
    spent = min(1.0, (decisions.hours if config.train.hours else decisions.dollars) / budget)
    warmup = spent * min(1.0, config.optimizer.warmup_steps / step)
    return decisions._replace(num_steps=0, planned_step=step, planned_share=spent, warmup_share=warmup, budget=budget)
