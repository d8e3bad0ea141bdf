"""Decides after which steps to save a checkpoint, by step number and by time, consistently in all processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlm.config.schema import CheckpointConfig
from maxlm.training.retention import next_check, should_save


def broadcast_from_host0(values: np.ndarray) -> np.ndarray:
    """Returns the values of process 0 in all processes. Clocks differ, and all processes must save together."""
    return values if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(values))


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
        self._config = config
        self._clock = clock
        self._agree = agree
        self._start_time, self._start_step = clock(), start
        self._last_save_time, self._next_check_step = self._start_time, start + 1

    def should_save(self, step: int, *, num_steps: int) -> bool:
        """Returns True if a checkpoint is due after `step`. All processes call it once after every step."""
        seconds = 0.0
        save_interval_minutes = self._config.save_interval_minutes
        if save_interval_minutes and step >= self._next_check_step:
            now = self._clock()
            since_save, step_seconds = now - self._last_save_time, (now - self._start_time) / (step - self._start_step)
            seconds, step_seconds = map(float, self._agree(np.asarray([since_save, step_seconds], np.float32)))
            self._next_check_step = next_check(
                step, seconds_left=60 * save_interval_minutes - seconds, step_seconds=step_seconds
            )
        return should_save(
            step,
            num_steps=num_steps,
            save_interval_steps=self._config.save_interval_steps,
            keep_period=self._config.keep_period,
            seconds=seconds,
            save_interval_minutes=save_interval_minutes,
        )

    def record_save(self, step: int) -> None:
        """Records a save, scheduled or not."""
        self._last_save_time, self._next_check_step = self._clock(), step + 1
