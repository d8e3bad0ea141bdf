"""One step after the other: the program of each, its batch, and what is looked at on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax

from maxlm.config.keys import Config
from maxlm.data.windows import Batch
from maxlm.planning.compile import CompiledStep, compile_train_step
from maxlm.planning.flops import step_flops
from maxlm.runtime.console import logger
from maxlm.runtime.data_wait import DataWait
from maxlm.runtime.diary import Diary
from maxlm.runtime.feed import Feed
from maxlm.runtime.pace import Pace
from maxlm.runtime.preflight import Ready
from maxlm.runtime.profile import Profile
from maxlm.runtime.reporter import Reporter
from maxlm.runtime.watchdog import Watchdog
from maxlm.training.decisions import Decisions, decided, with_rates
from maxlm.training.state import TrainState


class Stepping:
    """Takes the steps of a run."""

    def __init__(
        self,
        ready: Ready,
        feed: Feed,
        *,
        data_wait: DataWait,
        diary: Diary,
        watchdog: Watchdog,
        profile: Profile,
        reporter: Reporter,
        pace: Pace,
    ):
        self._config, self._layout, self._abstract, forecast = ready
        self._program: tuple[Config, CompiledStep | None] = forecast.config, forecast.compiled
        self._feed, self._data_wait, self._diary, self._timeline = feed, data_wait, diary, diary.timeline
        self._watchdog, self._profile, self._reporter, self._pace = watchdog, profile, reporter, pace

    def take(
        self, step: int, state: TrainState, batches: Iterator[Batch], decisions: Decisions, *, connects: bool
    ) -> TrainState:
        """The state after the next batch; the first step connects processes, which may take long."""
        compiled = self._compiled_for(step, decisions)
        if self._profile.begins(step):
            self._at_rest(state, partial(self._profile.start, step))
        if self._feed.works_before(step):
            self._prepare(step, state)
        # Shorter sequences are more of them.
        rows = self._program[0].train.global_batch
        batch, data_wait = self._data_wait.take(batches, self._reporter.running)
        # Dispatch may wait for other processes too.
        with self._watchdog.phase() if connects else self._watchdog.waiting():
            # Only the batch moves to the device, and by an explicit transfer; a hidden one would stall every step.
            with jax.transfer_guard('disallow'):
                state, metrics = compiled(state, self._layout.put_batch(batch, rows))
            if connects:
                jax.block_until_ready(metrics)
        with self._watchdog.waiting():
            self._reporter.submit(step, metrics, data_wait)
        if self._profile.ends(step):
            self._at_rest(state, partial(self._profile.stop, step))
        self._watchdog.step_done()
        return state

    def _at_rest(self, state: TrainState, act: Callable[[], None]) -> None:
        """Does something between two steps, when the devices have nothing to do; it counts as no time of a step."""
        with self._watchdog.waiting():
            self._reporter.flush()
            jax.block_until_ready(state)
        with self._pace.paused('profile'), self._timeline.phase('other'), self._watchdog.phase():
            act()

    def _prepare(self, step: int, state: TrainState) -> None:
        """Has the feed make batches from the state."""
        with self._watchdog.waiting():
            self._reporter.flush()
        with self._pace.paused('rollout'), self._timeline.phase('rollout'), self._watchdog.phase():
            written = self._feed.prepare(step, state)
        self._reporter.wrote(step, written.metrics, written.text)
        self._reporter.sampled(step, written.samples)

    def _compiled_for(self, step: int, decisions: Decisions) -> jax.stages.Compiled:
        """The program of a step: another one after a change of the sequences' length or of the rates."""
        now = with_rates(self._config, decisions)
        wanted = now.at_context(now.context_at(step - 1))
        before, compiled = self._program
        if compiled is None or wanted != before:
            # What was dispatched is still of the old one.
            with self._watchdog.waiting():
                self._reporter.flush()
            with self._pace.paused('compile'), self._timeline.phase('compile'), self._watchdog.phase():
                compiled = compile_train_step(wanted, self._layout, self._abstract, len(self._feed.names))
            self._diary.event('compiled', f'the step, in {compiled.seconds:.1f} s', seconds=compiled.seconds)
            self._pace.change_flops(step_flops(now, wanted.data.window))
            self._reporter.change_config(decided(self._config, decisions))
            if wanted.data.window != before.data.window:
                text = f'sequences of {wanted.data.window} tokens from here on'
                logger.info(f'step {step:>7}  {text}')
                self._diary.event('context', text, window=wanted.data.window)
            self._program = wanted, compiled
        return compiled.step
