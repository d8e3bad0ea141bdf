"""Save and retention policy of checkpoints, as pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

LAST, BEST, PERMANENT = 'last', 'best', 'permanent'


class SavedStep(NamedTuple):
    """Step and validation loss of a checkpoint. The loss is None if the step was not evaluated."""

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
    """Returns True if a checkpoint must be saved after this step.

    Args:
        step: number of the step that was just completed, counted from 1.
        num_steps: number of steps of the run. The last step is always saved.
        save_interval_steps: save every this many steps; 0 disables saving by steps.
        keep_period: multiples of it are kept permanently and always saved; 0 means none.
        seconds: seconds since the last save or since the start.
        save_interval_minutes: save every this many minutes; 0 disables saving by time.
    """
    by_number = any(every and step % every == 0 for every in (save_interval_steps, keep_period))
    return step == num_steps or by_number or bool(save_interval_minutes and seconds >= 60 * save_interval_minutes)


def next_check(step: int, *, seconds_left: float, step_seconds: float) -> int:
    """Returns the step after which the elapsed time must be checked again.

    A check has a cost, so the next one is after half of the steps that fit into the remaining time, at least one step.
    It is still in time if steps become up to twice as slow. The number of checks grows with the logarithm of the time
    between two saves.
    """
    fit = seconds_left / step_seconds if step_seconds > 0 else 0.0
    return step + max(1, int(fit / 2))


def best_step(saved: Iterable[SavedStep]) -> int | None:
    """Returns the step with the lowest finite validation loss, the newest on a tie; None if there is no such loss."""
    best = _by_loss(saved)
    return best[0].step if best else None


def retention_reasons(
    saved: Iterable[SavedStep], *, max_to_keep: int, keep_best: int, keep_period: int
) -> dict[int, tuple[str, ...]]:
    """Returns the reasons to keep each saved step, in order of the steps. Steps without a reason may be deleted.

    Args:
        saved: existing checkpoints.
        max_to_keep: number of newest checkpoints to keep, at least 1.
        keep_best: number of checkpoints with the lowest validation loss to keep.
        keep_period: multiples of it are kept permanently; 0 means none. Step 0, at which an imported model starts, is
            not a multiple.
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


def steps_to_delete(
    saved: Iterable[SavedStep],
    sizes: Mapping[int, int],
    *,
    max_bytes: int,
    reserved: int = 0,
    max_to_keep: int,
    keep_best: int,
    keep_period: int,
) -> list[int]:
    """Returns the checkpoints to delete, in the order in which to delete them.

    First the checkpoints without a reason to keep. Then, until the others fit `max_bytes`, the oldest ones, and after
    them the oldest of those with the lowest loss. Permanent checkpoints and the newest one are never deleted.

    Args:
        saved: existing checkpoints.
        sizes: bytes of each checkpoint; not used if `max_bytes` is 0.
        max_bytes: maximum bytes of all checkpoints; 0 = no limit.
        reserved: bytes of `max_bytes` that must stay free.
        max_to_keep, keep_best, keep_period: see `retention_reasons`.
    """
    reasons = retention_reasons(saved, max_to_keep=max_to_keep, keep_best=keep_best, keep_period=keep_period)
    deleted = [step for step, why in reasons.items() if not why]
    if not max_bytes:
        return deleted
    kept = [step for step, why in reasons.items() if why]
    total = reserved + sum(sizes[step] for step in kept)
    candidates = [step for step in kept[:-1] if PERMANENT not in reasons[step]]
    for step in sorted(candidates, key=lambda step: (BEST in reasons[step], step)):
        if total <= max_bytes:
            break
        deleted.append(step)
        total -= sizes[step]
    return deleted


def steps_to_resume(steps: Iterable[int], *, max_rollbacks: int, rollback_skip_steps: int) -> set[int]:
    """Returns the steps whose optimizer state a run needs if it resumes from the newest step.

    These are the newest step, and the steps that `on_bad_steps` can restore after bad steps directly after it.

    Args:
        steps: existing checkpoints with optimizer state.
        max_rollbacks: `guard.max_rollbacks`.
        rollback_skip_steps: `guard.rollback_skip_steps`.
    """
    steps = sorted(steps)
    if not steps or not max_rollbacks:
        return set(steps[-1:])
    wanted = steps[-1] - rollback_skip_steps
    older = [step for step in steps if step <= wanted]
    return {step for step in steps if step > wanted} | set(older[-1:])


def _by_loss(saved: Iterable[SavedStep]) -> list[SavedStep]:
    """Returns the checkpoints with a finite loss, lowest loss first."""
    known = [(one.validation_loss, -one.step, one) for one in saved if one.validation_loss is not None]
    return [one for loss, _, one in sorted(known) if math.isfinite(loss)]
