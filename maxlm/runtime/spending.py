"""What a run has cost so far, and its length where a budget gives that; the same in all processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from maxlm.config.keys import Config
from maxlm.runtime.pace import Pace
from maxlm.runtime.save_times import of_first_process
from maxlm.training.decisions import (
    UNMEASURED_STEPS,
    Decisions,
    decide_length,
    must_decide_length,
    seconds_left,
    spend,
)
from maxlm.training.retention import next_look


class Spending:
    """Looks at the clock only now and then, since several processes must agree on what it says."""

    def __init__(
        self,
        config: Config,
        *,
        began: float,
        pace: Pace,
        num_devices: int,
        evaluation_share: float,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[np.ndarray], np.ndarray] = of_first_process,
    ):
        """
        Args:
            config: of the run.
            began: what the clock said when this process began: starting costs too.
            pace: durations of steps.
            num_devices: of the run.
            evaluation_share: what evaluations take, as a share of what steps take.
            clock: seconds.
            agree: values of this process → those that all processes use.
        """
        self._config, self._pace, self._num_devices = config, pace, num_devices
        self._evaluation_share = evaluation_share
        self._clock, self._agree = clock, agree
        self._counted, self._counted_steps = began, 0.0
        self.begin(0)

    def begin(self, start: int) -> None:
        """The run goes on from step number `start`."""
        self._start, self._began = start, self._counted
        self._look = start + 1
        self._warm = self._pace.steps, self._pace.seconds

    def after(self, step: int, decisions: Decisions, *, look: bool) -> Decisions:
        """With what was spent until now, and the length of the run when it is time for that.

        To be called once after every step, by all processes.

        Args:
            step: number of the step.
            decisions: those before.
            look: whether to look at the clock in any case.
        """
        done = step - self._start
        if done == UNMEASURED_STEPS:
            self._warm = self._pace.steps, self._pace.seconds
        decides = must_decide_length(decisions, done, self._config)
        bounded = seconds_left(decisions, self._config, self._num_devices) is not None
        if not (look or decides or (bounded and step >= self._look)):
            return decisions
        now, in_steps = self._clock(), self._pace.seconds
        steps, seconds = self._pace.steps - self._warm[0], in_steps - self._warm[1]
        mine = (
            now - self._counted,
            in_steps - self._counted_steps,
            (now - self._began) / done,
            seconds / max(steps, 1),
        )
        self._counted, self._counted_steps = now, in_steps
        passed, in_steps, whole_step, warm_step = map(float, self._agree(np.asarray(mine, np.float64)))
        decisions = spend(
            decisions,
            passed,
            step_seconds=in_steps,
            num_devices=self._num_devices,
            price_per_hour=self._config.train.price_per_hour,
        )
        if decides:
            decisions = decide_length(
                decisions,
                step=step,
                step_seconds=warm_step * (1 + self._evaluation_share),
                num_devices=self._num_devices,
                config=self._config,
            )
        left = seconds_left(decisions, self._config, self._num_devices)
        if left is not None:
            self._look = next_look(step, seconds_left=left, step_seconds=whole_step)
        return decisions
