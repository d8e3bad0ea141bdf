"""The loop over the steps of a run. It computes and decides nothing itself: it asks, and carries out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from functools import partial
from typing import NamedTuple

import jax

from maxlm.checkpoint.manager import Checkpoints
from maxlm.checkpoint.save_policy import SavePolicy
from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.data.loader.skipped_batches import skip_steps
from maxlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, InputError
from maxlm.evaluation.periodic import open_tasks, task_text
from maxlm.hardware.chips import find_peak
from maxlm.log import logger, progress_bar
from maxlm.planning.estimate.flops import step_flops
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.runtime.maintenance import MaintenanceWatcher
from maxlm.runtime.preemption import StopRequest
from maxlm.runtime.watchdog import Watchdog
from maxlm.telemetry.metrics import MetricWriter, lowest_loss
from maxlm.telemetry.trackers import Trackers
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.budget import RunBudget
from maxlm.trainer.initialize import reference_metadata, restore_or_initialize
from maxlm.trainer.metric_logger import Reporter
from maxlm.trainer.preflight import PreparedStep
from maxlm.trainer.run_context import RunContext
from maxlm.trainer.step_runner import DataWait, StepRunner
from maxlm.trainer.summary import headline, log_end, log_start, start_facts
from maxlm.trainer.throughput import Throughput
from maxlm.training.run_control import (
    Rollback,
    RunControl,
    Stop,
    after_evaluation,
    apply_control,
    budget_spent,
    ended,
    from_json,
    on_bad_steps,
    rolled_back,
    to_json,
)
from maxlm.training.run_length import at_start, progress_of
from maxlm.training.state import TrainState, evaluated_params, with_progress
from maxlm.workdir.files import describe_run


class Segment(NamedTuple):
    """Steps one after the other, and what they came to: a verdict on bad steps, an end, or being told to stop."""

    step: int
    decisions: RunControl
    verdict: Rollback | Stop | None
    # Why the run is over; '' = it is not.
    ended: str


class Trainer:
    """What stays the same from the first step of a process to its last, and the loop over steps."""

    def __init__(
        self, stack: contextlib.ExitStack, ready: PreparedStep, feed: BatchSource, home: RunContext, peers: Heartbeats
    ):
        """Enters what a run needs into `stack`."""
        self._ready = ready
        self._config, self._layout, self._abstract, self._forecast = ready
        self._feed, self._home, self._diary = feed, home, home.diary
        self._timeline = self._diary.timeline
        config = self._config
        self._peak = find_peak(config.metrics.peak_tflops)
        facts = start_facts(ready, feed, self._peak, self._diary.price)
        self._diary.event('started', headline(config, self._abstract), **facts)
        if compiled := self._forecast.compiled:
            self._diary.event('compiled', f'the step, in {compiled.seconds:.1f} s', seconds=compiled.seconds)
        self._first = jax.process_index() == 0
        self._watchdog = stack.enter_context(
            Watchdog(config.train.hang_timeout_seconds, peers, home.workdir if self._first else None)
        )
        self._stop = stack.enter_context(StopRequest())
        stack.enter_context(MaintenanceWatcher(self._stop.request, tell=partial(home.alerts.send, 'machine')))
        # Leaving the stack, after an error too, brings to disk what was saved.
        self._checkpoints = stack.enter_context(
            Checkpoints(
                home.checkpoints,
                max_to_keep=config.checkpoint.max_to_keep,
                keep_best=config.checkpoint.keep_best,
                keep_period=config.checkpoint.keep_period,
                on_failure=partial(home.alerts.send, 'checkpoint'),
            )
        )
        self._data_wait = stack.enter_context(DataWait(self._timeline))
        self._facts = feed.fingerprint(config.train.global_batch_size) | reference_metadata(config)
        self._stack = stack

    def start(self) -> tuple[TrainState, RunControl]:
        """Where the run stands."""
        reads = self._checkpoints.latest_step() is not None or self._config.train.init_from
        with self._timeline.phase('restore') if reads else contextlib.nullcontext():
            state, history = restore_or_initialize(
                self._config,
                tokenizer=self._feed.tokenizer_path,
                layout=self._layout,
                abstract=self._abstract,
                checkpoints=self._checkpoints,
                facts=self._facts,
            )
        # Should metrics.jsonl be lost.
        self._best_loss = float(history.get('best_loss', math.inf))
        return state, at_start(from_json(history.get('decisions')), self._config, int(state.step))

    def tell(self, start: int, decisions: RunControl) -> None:
        """Says what is about to happen, and makes ready to tell what does."""
        config, feed, train = apply_control(self._config, decisions), self._feed, self._config.train
        self._describe(decisions)
        if start:
            self._diary.event('resumed', f'going on from step {start}', step=start, from_step=start)
        feed.open(config, self._layout)
        self._tasks = open_tasks(config, self._layout, feed.tokenizer_path)
        self._observers = Trackers(self._stack, config, workdir=self._home.workdir, life=self._diary.life)
        log_start(config, self._abstract, self._forecast, peak=self._peak, price=self._diary.price)
        self._pace = Throughput(
            tokens_per_step=train.global_batch_size * config.data.seq_len,
            flops=step_flops(config, config.context_at(start)),
            peak=self._peak,
            num_devices=jax.device_count(),
        )
        self._sources = feed.sources()
        if config.train.num_steps != UNDECIDED_STEPS:
            self._sources.log_start(config.train.num_steps * train.global_batch_size)
        show_bar = config.metrics.progress_bar and self._first
        bar = progress_bar(total=config.train.num_steps, initial=start, unit='step', show=show_bar)
        self._reporter = Reporter(
            config,
            pace=self._pace,
            bar=self._stack.enter_context(bar),
            windows_per_epoch=feed.windows_per_epoch,
            sources=self._sources,
            warn=partial(self._home.alerts.send, 'skipped'),
            costs=self._diary.metrics,
            devices=self._observers.readings.metrics,
        )
        self._stepping = StepRunner(
            self._ready,
            feed,
            data_wait=self._data_wait,
            diary=self._diary,
            watchdog=self._watchdog,
            profile=self._observers.profile,
            reporter=self._reporter,
            pace=self._pace,
        )
        # What lives that were killed had not saved any more was paid for as well.
        untold = max(0.0, self._diary.earlier_seconds - 3600 * decisions.hours)
        self._spending = RunBudget(
            self._config,
            began=self._timeline.origin - untold,
            pace=self._pace,
            num_devices=jax.device_count(),
            evaluation_share=feed.evaluation_share,
            save_seconds=lambda: self._checkpoints.save_seconds,
        )

    def leg(self, state: TrainState, decisions: RunControl) -> Segment:
        """Trains until the run is over, is told to stop, or has met too many bad steps."""
        config, reporter, watchdog = self._config, self._reporter, self._watchdog
        start = int(state.step)
        state = self._lay_schedule(state, decisions)
        with contextlib.ExitStack() as stack:
            alarm = partial(self._home.alerts.send, 'data')
            reading = self._feed.batches(start, config, decisions, layout=self._layout, alarm=alarm)
            batches = stack.enter_context(reading)
            self._report_from(start, int(state.skipped), stack)
            times = SavePolicy(config.checkpoint, start=start)
            self._timeline.started()
            stack.enter_context(self._timeline.phase('step'))
            owed = False
            if start == 0 and config.eval.interval and config.train.objective != 'next_token':
                # It begins with a model that can do something: by that it is measured.
                with watchdog.phase():
                    self._evaluate(0, state)
            for step in itertools.count(start + 1):
                try:
                    state = self._stepping.take(step, state, batches, decisions, connects=step == start + 1)
                except InputError:
                    # Of the data. Of several processes the others wait for this one, and cannot save.
                    if jax.process_count() == 1 and step > start + 1 and self._feed.may_pause_after(step - 1):
                        reporter.flush()
                        self._save(step - 1, state, decisions)
                    raise

                num_steps = apply_control(config, decisions).train.num_steps
                if step < num_steps and not self._feed.may_pause_after(step):
                    # What the next steps learn from is not to be had again.
                    owed |= times.due(step, num_steps=num_steps)
                    continue
                told = self._stop.reached()
                # While steps are bad none is saved: there is nothing new in it, and older ones would go for it.
                owed |= times.due(step, num_steps=num_steps)
                # Who is told to stop has little time: then the state is saved and nothing else is done.
                validate = _due(step, config.eval.interval, num_steps) and (not told or step == num_steps)
                examine = _due(step, config.eval.tasks_interval, num_steps) and (not told or step == num_steps)
                if told or owed or validate or examine or step == num_steps:
                    # Waits for the step here, where the wait still counts as the step's own time.
                    with watchdog.waiting():
                        reporter.flush()
                verdict = None if told else self._judge(decisions)
                if verdict:
                    watchdog.finish()
                    return Segment(step, decisions, verdict, '')
                loss = None
                with watchdog.phase():
                    if validate:
                        loss = self._evaluate(step, state)
                        decisions = after_evaluation(decisions, loss, config.guard)
                    if examine:
                        self._examine(step, state)
                    before, decisions = decisions, self._spend(step, decisions, look=owed or told or validate)
                    if decisions.num_steps != before.num_steps:
                        state = self._lay_schedule(state, decisions)
                    why = ended(config, decisions, step)
                    if why:
                        # A budget may end a run at any step.
                        reporter.flush()
                    if why and not (told or self._is_finite(loss)):
                        # Older checkpoints are better, and a run that is started again must not count as done.
                        watchdog.finish()
                        reason = 'the loss of the last step, or its parameters, are not finite'
                        return Segment(step, decisions, Stop(reason), '')
                    if why or told or (owed and reporter.is_finite and not reporter.bad_steps.in_a_row):
                        with self._pace.paused('save'):
                            self._save(step, state, decisions, loss, must=bool(why or told))
                        times.saved(step)
                        owed = False
                if why or told:
                    watchdog.finish()
                    return Segment(step, decisions, None, why)
        raise AssertionError('a leg ends by its return')

    def _evaluate(self, step: int, state: TrainState) -> float:
        """Evaluates and samples, tells of it, and returns the loss."""
        with self._pace.paused('eval'), self._timeline.phase('evaluation'):
            result = self._feed.evaluate(state)
            text = self._reporter.evaluated(step, result)
            self._reporter.sampled(step, self._feed.sample(evaluated_params(state)))
        self._diary.event('evaluated', text, step=step, loss=result.loss)
        return result.loss

    def _examine(self, step: int, state: TrainState) -> None:
        """Runs the benchmarks and tells of them."""
        assert self._tasks, 'tell() made them, since eval.tasks_interval is set'
        with self._pace.paused('eval', name='tasks'), self._timeline.phase('evaluation'):
            scores = self._tasks(evaluated_params(state))
            self._reporter.wrote(step, scores, task_text(scores))

    def go_back(self, plan: Rollback, decisions: RunControl) -> tuple[TrainState, RunControl]:
        """The state of an older checkpoint, and the decisions with what is left out from there."""
        skips = skip_steps(decisions.skips, plan.skip_from, plan.skip_to)
        self._home.alerts.send(
            'rollback',
            f'steps up to {plan.skip_to} spike or are not finite: back to step {plan.step} and on without the batches '
            f'of steps {plan.skip_from + 1} to {plan.skip_to} '
            f'({decisions.rollbacks + 1} of {self._config.guard.max_rollbacks} times)',
        )
        with self._watchdog.phase(), self._timeline.phase('restore'):
            self._checkpoints.remove_after(plan.step)
            state, then = self.start()
        self._diary.rolled_back(plan.step)
        return state, rolled_back(decisions, then, skips, self._config.guard)

    def end(self, leg: Segment) -> int:
        """Waits for the last checkpoint and says what became of the run; returns the exit code."""
        with self._timeline.phase('checkpoint'):
            saved = self._checkpoints.wait()
        if isinstance(leg.verdict, Stop):
            text = f'stopped at step {leg.step}: {leg.verdict.reason}; the newest checkpoint is of step {saved}'
            self._home.alerts.send('diverged', text)
            return EXIT_FAILED
        if saved != leg.step:
            text = f'step {leg.step} could not be saved; the newest is step {saved}'
            self._home.alerts.send('checkpoint', text)
            self._diary.ends('failed', text, EXIT_FAILED)
            return EXIT_FAILED
        num_steps = apply_control(self._config, leg.decisions).train.num_steps
        if not leg.ended:
            text = f'{self._stop.requested}: step {leg.step} of {num_steps} is saved; start again to go on'
            logger.info(text)
            self._diary.ends('preempted', text, EXIT_PREEMPTED)
            return EXIT_PREEMPTED
        self._diary.ends('finished', leg.ended, EXIT_DONE)
        log_end(
            leg.step,
            leg.ended,
            feed=self._feed,
            reporter=self._reporter,
            pace=self._pace,
            spent=self._diary.metrics(leg.step, num_steps),
            seconds=time.monotonic() - self._timeline.origin,
        )
        return EXIT_DONE

    def _report_from(self, start: int, skipped: int, stack: contextlib.ExitStack) -> None:
        writer, best_loss = None, math.inf
        if self._first:
            # The file is about to be written anew.
            best_loss = min(self._best_loss, lowest_loss(self._home.workdir, up_to=start))
            writer = MetricWriter(self._home.workdir, after_step=start, trackers=self._observers.trackers)
        self._reporter.begin(start, writer=writer, skipped=skipped, best_loss=best_loss)
        self._spending.begin(start)
        self._diary.begin(start, lambda: (self._reporter.step, self._checkpoints.latest_step()))
        self._pace.start()
        self._watchdog.start()

    def _save(
        self,
        step: int,
        state: TrainState,
        decisions: RunControl,
        validation_loss: float | None = None,
        *,
        must: bool = True,
    ) -> None:
        best = self._reporter.best_loss
        # JSON has no infinity.
        history = {'decisions': to_json(decisions), **({'best_loss': best} if math.isfinite(best) else {})}
        began = time.monotonic()
        with self._timeline.phase('checkpoint'):
            taken = self._checkpoints.save(
                step, state, self._facts, validation_loss=validation_loss, history=history, must=must
            )
        if taken:
            loss = {} if validation_loss is None else {'loss': validation_loss}
            seconds = round(time.monotonic() - began, 3)
            self._diary.event('saved', f'held up the steps for {seconds:.2f} s', step=step, seconds=seconds, **loss)
            self._diary.saved()

    def _describe(self, decisions: RunControl) -> None:
        """Writes config.json with the length that was decided on, and without other rates, which the state knows."""
        train = self._config.train
        if decisions.num_steps:
            train = dataclasses.replace(train, num_steps=decisions.num_steps)
        if self._first:
            config = dataclasses.replace(self._config, train=train)
            describe_run(self._home.workdir, config, self._feed.tokenizer_path)

    def _lay_schedule(self, state: TrainState, decisions: RunControl) -> TrainState:
        """Returns the state with the length that was decided on, which the reporter gets too."""
        if not self._config.by_budget:
            return state
        self._reporter.change_config(apply_control(self._config, decisions))
        return with_progress(state, progress_of(decisions, self._config), self._layout)

    def _is_finite(self, validation_loss: float | None) -> bool:
        return self._reporter.is_finite and (validation_loss is None or math.isfinite(validation_loss))

    def _judge(self, decisions: RunControl) -> Rollback | Stop | None:
        bad = self._reporter.bad_steps
        if bad.in_a_row < self._config.guard.max_consecutive_skips:
            return None
        # A run can always start anew.
        saved = sorted({0, *self._checkpoints.steps()})
        return on_bad_steps(decisions, bad, saved, self._config)

    def _spend(self, step: int, decisions: RunControl, *, look: bool) -> RunControl:
        before = budget_spent(decisions, self._config)
        after = self._spending.after(step, decisions, look=look)
        budget = budget_spent(after, self._config)
        if budget and budget.alert and not (before and before.alert):
            self._home.alerts.send('budget', f'{budget.share:.0%} of {budget.name} is spent')
        if after.num_steps != decisions.num_steps:
            self._describe(after)
            self._reporter.change_config(apply_control(self._config, after))
            text = (
                f'at {after.step_seconds:.3g} s per step the budget is {after.num_steps} steps, where the schedule ends'
            )
            logger.info(f'step {step:>7}  {text}')
            self._diary.event('length', text, step=step, num_steps=after.num_steps)
            if not decisions.num_steps:
                self._sources.log_start(after.num_steps * self._config.train.global_batch_size)
        return after


def _due(step: int, every: int, num_steps: int) -> bool:
    return every > 0 and (step % every == 0 or step == num_steps)
