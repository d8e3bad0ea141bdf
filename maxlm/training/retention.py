"""Checkpoint retention: which steps are saved, and which of the saved ones stay, as pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

LAST, BEST, PERMANENT = 'last', 'best', 'permanent'


class SavedStep(NamedTuple):
    """A checkpoint; `validation_loss` None = there was no evaluation at this step."""

    step: int
    validation_loss: float | None = None


def should_save(
    step: int,
    *,
    num_steps: int,
    save_interval_steps: int,
    keep_period: int,
    seconds: float,
    save_interval_minutes: float,
) -> bool:
    """Whether a step is to be saved.

    Args:
        step: number of the step that was just done, from 1.
        num_steps: of the run; its last one is always saved.
        save_interval_steps: 0 = never by steps.
        keep_period: steps that stay for good are saved whatever else is asked for; 0 = none.
        seconds: since the last save, or since the start.
        save_interval_minutes: 0 = never by time.
    """
    by_number = any(every and step % every == 0 for every in (save_interval_steps, keep_period))
    return step == num_steps or by_number or bool(save_interval_minutes and seconds >= 60 * save_interval_minutes)


def next_check(step: int, *, seconds_left: float, step_seconds: float) -> int:
    """The step after which the clock is to be looked at again, when every look costs something.

    Half of the steps that fit into the time left, at least one: a pace that doubles is still seen in time, and the
    number of looks grows with the logarithm of the time between two saves.
    """
    fit = seconds_left / step_seconds if step_seconds > 0 else 0.0
    return step + max(1, int(fit / 2))


def best_step(saved: Iterable[SavedStep]) -> int | None:
    """The step with the lowest validation loss, of equal ones the newest; None where no loss is known."""
    best = _by_loss(saved)
    return best[0].step if best else None


def retention_reasons(
    saved: Iterable[SavedStep], *, max_to_keep: int, keep_best: int, keep_period: int
) -> dict[int, tuple[str, ...]]:
    """Why each of the saved steps stays, in their order; those that may go have no reason.

    Args:
        saved: the checkpoints there are.
        max_to_keep: so many of the newest stay; at least 1.
        keep_best: so many with the lowest validation loss stay.
        keep_period: multiples of it stay for good; 0 = none. Step 0, where an import starts, is none of them.
    """
    assert max_to_keep >= 1, max_to_keep
    saved = sorted(saved)
    last = {one.step for one in saved[-max_to_keep:]}
    best = {one.step for one in _by_loss(saved)[:keep_best]}
    reasons = {}
    for one in saved:
        permanent = keep_period > 0 and one.step > 0 and one.step % keep_period == 0
        holds = {LAST: one.step in last, BEST: one.step in best, PERMANENT: permanent}
        reasons[one.step] = tuple(reason for reason, holds_here in holds.items() if holds_here)
    return reasons


def _by_loss(saved: Iterable[SavedStep]) -> list[SavedStep]:
    """Those with a finite loss, the best first."""
    known = [(one.validation_loss, -one.step, one) for one in saved if one.validation_loss is not None]
    return [one for loss, _, one in sorted(known) if math.isfinite(loss)]
