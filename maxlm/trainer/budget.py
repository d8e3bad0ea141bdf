"""Tracks the time and money spent by a run, and decides its length if a budget gives it."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

import numpy as np

from maxlm.checkpoint.retention import broadcast_from_host0, next_check
from maxlm.config.schema import Config
from maxlm.trainer.throughput import Throughput
from maxlm.training.decisions.run_control import RunControl, seconds_left, spend
from maxlm.training.decisions.run_length import (
    MEASURED_FRACTION,
    MEASURED_STEPS,
    UNMEASURED_STEPS,
    Costs,
    budget_left,
    budget_seconds,
    decide_length,
    measured_steps,
    next_decision,
)


class RunBudget:
    """Budget of a run. It reads the clock only at intervals, because all processes must agree on the time."""

    def __init__(
        self,
        config: Config,
        *,
        began: float,
        throughput: Throughput,
        num_devices: int,
        evaluation_fraction: float,
        save_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[np.ndarray], np.ndarray] = broadcast_from_host0,
    ):
        """
        Args:
            config: config of the run.
            began: clock time at the start of this process, because startup also costs money.
            throughput: durations of steps and pauses.
            num_devices: number of devices of the run.
            evaluation_fraction: expected time of evaluations relative to steps, used until an evaluation is measured.
            save_seconds: returns the seconds until the newest save was stored; 0 means unknown.
            clock: returns the time in seconds.
            agree: maps the values of this process to the values used by all processes.
        """
        self._config, self._throughput, self._num_devices = config, throughput, num_devices
        self._evaluation_fraction, self._save_seconds = evaluation_fraction, save_seconds
        self._clock, self._agree = clock, agree
        self._counted, self._counted_steps = began, 0.0
        # Number of steps and their seconds at the start of the measurement.
        self._measured: tuple[int, float] = (0, 0.0)
        self.begin(0)

    def begin(self, start: int) -> None:
        """Continues from step number `start`."""
        self._start, self._began = start, self._counted
        self._look = start + 1
        self._measure()

    def after(self, step: int, decisions: RunControl, *, look: bool) -> RunControl:
        """Returns the decisions with the current costs, and with the run length if a budget gives it.

        All processes must call it once after every step.

        Args:
            step: number of the completed step.
            decisions: previous decisions.
            look: if True, read the clock in any case.
        """
        done = step - self._start
        if done in (2, UNMEASURED_STEPS):
            # Earlier steps are slower (caches, connections). After two steps only the first step is excluded, in case
            # steps take very long.
            self._measure()
        decides = self._config.by_budget and (not decisions.num_steps or step < decisions.num_steps)
        bounded = seconds_left(decisions, self._config, self._num_devices) is not None
        first = decides and done == UNMEASURED_STEPS + MEASURED_STEPS and not decisions.step_seconds
        if not (look or first or (bounded and step >= self._look)):
            return decisions
        now, in_steps = self._clock(), self._throughput.seconds
        mine = (
            now - self._counted,
            in_steps - self._counted_steps,
            (now - self._began) / done,
            self._throughput.steps - self._measured[0],
            in_steps - self._measured[1],
            *(self._throughput.pauses.get(name, 0.0) for name in ('eval', 'tasks', 'save')),
            self._save_seconds(),
        )
        self._counted, self._counted_steps = now, in_steps
        self._measured = self._throughput.steps, in_steps
        passed, in_steps, whole_step, *measured = map(float, self._agree(np.asarray(mine, np.float64)))
        if done < UNMEASURED_STEPS and decisions.step_seconds:
            # The measurements before the restart are more accurate.
            measured[:2] = 0.0, 0.0
        decisions = spend(
            decisions,
            passed,
            step_seconds=in_steps,
            num_devices=self._num_devices,
            price_per_hour=self._config.train.price_per_hour,
        )
        left = seconds_left(decisions, self._config, self._num_devices)
        if left is not None:
            self._look = next_check(step, seconds_left=left, step_seconds=whole_step)
        return self._decide(step, decisions, whole_step, *measured) if decides else decisions

    def _decide(
        self, step: int, decisions: RunControl, whole_step: float, steps: float, seconds: float, *pauses: float
    ) -> RunControl:
        """Returns the decisions with the new length once steps are measured. All values are equal on all processes."""
        config, num_devices = self._config, self._num_devices
        decisions = decisions._replace(budget=config.train.hours or config.train.dollars)
        self._window.append((steps, seconds))
        num_measured = measured_steps(decisions, step)
        while sum(steps for steps, _ in self._window) - self._window[0][0] >= num_measured:
            self._window.popleft()
        steps, seconds = map(sum, zip(*self._window, strict=True))
        enough = steps >= MEASURED_STEPS or seconds >= MEASURED_FRACTION * budget_seconds(config, num_devices)
        if decisions.step_seconds:
            # Missing steps count with the previous duration.
            missing = max(0.0, num_measured - steps)
            mean = (seconds + missing * decisions.step_seconds) / (steps + missing)
            decisions = decisions._replace(step_seconds=mean)
        elif steps and enough:
            decisions = decisions._replace(step_seconds=seconds / steps)
        if decisions.step_seconds:
            evaluation, tasks, save, last_save = pauses
            evaluation = evaluation or self._evaluation_fraction * config.eval.interval * decisions.step_seconds
            step_seconds = (1 + config.guard.replay_fraction) * decisions.step_seconds
            costs = Costs(step_seconds, evaluation, tasks, save, last_save)
            decisions = decide_length(decisions, step=step, costs=costs, num_devices=num_devices, config=config)
        again = next_decision(
            step,
            seconds_left=budget_left(decisions, config, num_devices),
            step_seconds=decisions.step_seconds or whole_step,
            config=config,
            num_devices=num_devices,
        )
        self._look = min(self._look, again)
        return decisions

    def _measure(self) -> None:
        """Restarts the measurement of steps."""
        self._measured = self._throughput.steps, self._throughput.seconds
        self._window: collections.deque[tuple[float, float]] = collections.deque()
