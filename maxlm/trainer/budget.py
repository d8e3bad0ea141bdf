"""Time and money that a run has spent, and its length where a budget gives that; the same in all processes."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

import numpy as np

from maxlm.checkpoint.save_policy import broadcast_from_host0
from maxlm.config.schema import Config
from maxlm.trainer.throughput import Throughput
from maxlm.training.retention import next_check
from maxlm.training.run_control import RunControl, seconds_left, spend
from maxlm.training.run_length import (
    MEASURED_SHARE,
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
    """Looks at the clock only now and then, since several processes must agree on what it says."""

    def __init__(
        self,
        config: Config,
        *,
        began: float,
        throughput: Throughput,
        num_devices: int,
        evaluation_share: float,
        save_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[np.ndarray], np.ndarray] = broadcast_from_host0,
    ):
        """
        Args:
            config: of the run.
            began: what the clock said when this process began: starting costs too.
            throughput: durations of steps, and of what happens between them.
            num_devices: of the run.
            evaluation_share: expected time of evaluations, as a share of that of steps, while none is measured.
            save_seconds: returns what the newest save took until it was stored; 0 = not known.
            clock: seconds.
            agree: values of this process → those that all processes use.
        """
        self._config, self._throughput, self._num_devices = config, throughput, num_devices
        self._evaluation_share, self._save_seconds = evaluation_share, save_seconds
        self._clock, self._agree = clock, agree
        self._counted, self._counted_steps = began, 0.0
        # Steps and their seconds at the start of the measurement.
        self._measured: tuple[int, float] = (0, 0.0)
        self.begin(0)

    def begin(self, start: int) -> None:
        """The run goes on from step number `start`."""
        self._start, self._began = start, self._counted
        self._look = start + 1
        self._measure()

    def after(self, step: int, decisions: RunControl, *, look: bool) -> RunControl:
        """With what was spent until now, and the length of the run where that is decided by its budget.

        To be called once after every step, by all processes.

        Args:
            step: number of the step.
            decisions: those before.
            look: whether to look at the clock in any case.
        """
        done = step - self._start
        if done in (2, UNMEASURED_STEPS):
            # Steps before are slower (caches, connections); where steps take very long, only the first one.
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
            # What was measured before the restart is better than these.
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
        """The length, once a step is measured; from numbers on which all processes agreed."""
        config, num_devices = self._config, self._num_devices
        decisions = decisions._replace(budget=config.train.hours or config.train.dollars)
        self._window.append((steps, seconds))
        wanted = measured_steps(decisions, step)
        while sum(steps for steps, _ in self._window) - self._window[0][0] >= wanted:
            self._window.popleft()
        steps, seconds = map(sum, zip(*self._window, strict=True))
        enough = steps >= MEASURED_STEPS or seconds >= MEASURED_SHARE * budget_seconds(config, num_devices)
        if decisions.step_seconds:
            # Steps that are not measured yet count as those before.
            missing = max(0.0, wanted - steps)
            mean = (seconds + missing * decisions.step_seconds) / (steps + missing)
            decisions = decisions._replace(step_seconds=mean)
        elif steps and enough:
            decisions = decisions._replace(step_seconds=seconds / steps)
        if decisions.step_seconds:
            evaluation, tasks, save, last_save = pauses
            evaluation = evaluation or self._evaluation_share * config.eval.interval * decisions.step_seconds
            costs = Costs(decisions.step_seconds, evaluation, tasks, save, last_save)
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
        """Forgets the steps that were measured."""
        self._measured = self._throughput.steps, self._throughput.seconds
        self._window: collections.deque[tuple[float, float]] = collections.deque()
