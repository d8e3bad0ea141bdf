"""Save and retention policies: after which steps a checkpoint is saved, and which checkpoints are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlm.config.schema import CheckpointConfig
from maxlm.formatting import format_bytes
from maxlm.log import logger
from maxlm.storage.filesystem import walk
from maxlm.workdir.step_dirs import StepDirectory

LAST, BEST, PERMANENT = 'last', 'best', 'permanent'

# Steps of existing checkpoints → their validation losses; None if a step was not evaluated.
Losses = Mapping[int, float | None]


class RetentionRules(NamedTuple):
    """Rules that select the checkpoints to keep.

    Attributes:
        max_to_keep: number of newest checkpoints to keep, at least 1.
        keep_best: number of checkpoints with the lowest validation loss to keep.
        keep_period: multiples of it are kept permanently; 0 means none. Step 0, at which an imported model starts, is
            not a multiple.
        max_bytes: maximum bytes of all checkpoints; 0 = no limit.
    """

    max_to_keep: int
    keep_best: int = 0
    keep_period: int = 0
    max_bytes: int = 0

    @classmethod
    def of(cls, config: CheckpointConfig) -> RetentionRules:
        """Returns the rules of a run."""
        return cls(config.max_to_keep, config.keep_best, config.keep_period, config.max_bytes)

    def reasons(self, losses: Losses) -> dict[int, tuple[str, ...]]:
        """Returns the reasons to keep each checkpoint, in order of the steps, regardless of the size.

        Checkpoints without a reason may be deleted.
        """
        assert self.max_to_keep >= 1, self.max_to_keep
        steps = sorted(losses)
        kept = {
            LAST: set(steps[-self.max_to_keep :]),
            BEST: set(_by_loss(losses)[: self.keep_best]),
            PERMANENT: {step for step in steps if self.keep_period and step and step % self.keep_period == 0},
        }
        return {step: tuple(reason for reason, chosen in kept.items() if step in chosen) for step in steps}

    def steps_to_delete(self, losses: Losses, sizes: Mapping[int, int], *, reserved: int = 0) -> list[int]:
        """Returns the checkpoints to delete, in the order in which to delete them.

        First the checkpoints without a reason to keep. Then, until the others fit `max_bytes`, the oldest ones, and
        after them the oldest of those with the lowest loss. Permanent checkpoints and the newest one are never deleted.

        Args:
            losses: existing checkpoints.
            sizes: bytes of each checkpoint; not used without a limit.
            reserved: bytes of `max_bytes` that must stay free.
        """
        reasons = self.reasons(losses)
        deleted = [step for step, why in reasons.items() if not why]
        if not self.max_bytes:
            return deleted
        kept = [step for step, why in reasons.items() if why]
        total = reserved + sum(sizes[step] for step in kept)
        candidates = [step for step in kept[:-1] if PERMANENT not in reasons[step]]
        for step in sorted(candidates, key=lambda step: (BEST in reasons[step], step)):
            if total <= self.max_bytes:
                break
            deleted.append(step)
            total -= sizes[step]
        return deleted


class RetentionPolicy:
    """Applies the rules to one directory of steps, whose sizes it measures. Only one thread may use it."""

    def __init__(self, folder: StepDirectory, rules: RetentionRules):
        self._folder, self.rules = folder, rules
        self._has_warned = False
        # Bytes of the steps of the last call. A new step can have the number of a deleted one.
        self._sizes: dict[int, int] = {}

    def steps_to_delete(self, losses: Losses, *, before_save: bool = False) -> list[int]:
        """Returns the steps to delete, in the order in which to delete them.

        Args:
            losses: the complete steps.
            before_save: also make space for a new step of the size of the newest one.

        Raises:
            StorageError: the directory cannot be listed.
        """
        limit = self.rules.max_bytes
        if limit:
            self._sizes = {step: self._sizes.get(step) or self._size(step) for step in losses}
        sizes = self._sizes
        reserved = sizes.get(max(losses, default=-1), 0) if before_save else 0
        deleted = self.rules.steps_to_delete(losses, sizes, reserved=reserved)
        left = sum(size for step, size in sizes.items() if step not in deleted)
        if left > limit and not before_save and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f'{self._folder.path}: checkpoints of {format_bytes(left)} exceed checkpoint.max_gib '
                f'({format_bytes(limit)}), because permanent checkpoints (checkpoint.keep_period) and the newest one '
                'are not deleted'
            )
        return deleted

    def _size(self, step: int) -> int:
        return sum(entry.size for entry in walk(str(self._folder.path / str(step))))


def best_step(losses: Losses) -> int | None:
    """Returns the step with the lowest finite validation loss, the newest on a tie; None if there is no such loss."""
    return next(iter(_by_loss(losses)), None)


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
    first_skipped = steps[-1] - rollback_skip_steps
    older = [step for step in steps if step <= first_skipped]
    return {step for step in steps if step > first_skipped} | set(older[-1:])


def _by_loss(losses: Losses) -> list[int]:
    """Returns the steps with a finite loss, lowest loss first and the newest first on a tie."""
    finite = [(loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [-negative for _, negative in sorted(finite)]


def broadcast_from_host0(values: np.ndarray) -> np.ndarray:
    """Returns the values of process 0 in all processes. Clocks differ, and all processes must save together."""
    return values if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(values))


def next_check(step: int, *, seconds_left: float, step_seconds: float) -> int:
    """Returns the step after which the elapsed time must be checked again.

    A check has a cost, so the next one is after half of the steps that fit into the remaining time, at least one step.
    It is still in time if steps become up to twice as slow. The number of checks grows with the logarithm of the time
    between two saves.
    """
    fit = seconds_left / step_seconds if step_seconds > 0 else 0.0
    return step + max(1, int(fit / 2))


class SavePolicy:
    """Decides after which steps to save. Reads the clock rarely, because the processes must agree on the time."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        start: int,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[np.ndarray], np.ndarray] = broadcast_from_host0,
    ):
        """
        Args:
            config: the checkpoint section of the run's config.
            start: number of the last finished step.
            clock: returns the time in seconds.
            agree: maps the values of this process to the values that all processes use.
        """
        self._config, self._clock, self._agree = config, clock, agree
        self._start_time, self._start_step = clock(), start
        self._last_save_time, self._next_check_step = self._start_time, start + 1

    def should_save(self, step: int, *, num_steps: int) -> bool:
        """Returns True if a checkpoint is due after `step`. All processes call it once after every step.

        The rules are independent: the last step, `checkpoint.save_interval_steps`, `checkpoint.keep_period` and
        `checkpoint.save_interval_minutes`, which 0 disables.

        Args:
            step: number of the step that was just completed, counted from 1.
            num_steps: number of steps of the run.
        """
        seconds_left = math.inf
        if self._config.save_interval_minutes and step >= self._next_check_step:
            now = self._clock()
            since_save, step_seconds = now - self._last_save_time, (now - self._start_time) / (step - self._start_step)
            seconds, step_seconds = map(float, self._agree(np.asarray([since_save, step_seconds], np.float32)))
            seconds_left = 60 * self._config.save_interval_minutes - seconds
            self._next_check_step = next_check(step, seconds_left=seconds_left, step_seconds=step_seconds)
        periods = (self._config.save_interval_steps, self._config.keep_period)
        return step == num_steps or seconds_left <= 0 or any(every and step % every == 0 for every in periods)

    def record_save(self, step: int) -> None:
        """Records a save, scheduled or not."""
        self._last_save_time, self._next_check_step = self._clock(), step + 1
