"""The training loop: trains, evaluates, saves, and reacts to bad steps and stop requests."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax

from maxlm.checkpoint.retention import SavePolicy
from maxlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, InputError, TerminatedError
from maxlm.evaluation.tasks.periodic import task_text
from maxlm.log import logger
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.callbacks import StateCallback, call_back
from maxlm.trainer.checkpointing import RunCheckpoints
from maxlm.trainer.preflight import PreparedStep
from maxlm.trainer.run_context import RunContext
from maxlm.trainer.setup import make_loop_components, open_services
from maxlm.trainer.summary import log_end
from maxlm.training.decisions.run_control import (
    Rollback,
    RunControl,
    Stop,
    after_evaluation,
    apply_control,
    budget_spent,
    ended,
    on_bad_steps,
)
from maxlm.training.decisions.run_length import progress_of
from maxlm.training.state import TrainState, evaluated_params, with_progress

# A new length of the run is reported if it differs by more than this fraction from the last reported one.
LENGTH_CHANGE = 0.1


class _StopWhileWaitingError(Exception):
    """The run must stop while a step waits for data in preparation. The message is the stop request."""


class Segment(NamedTuple):
    """Consecutive steps of a run, and how they ended.

    Attributes:
        step: number of the last step.
        decisions: the run's decisions after it.
        action: reaction to bad steps; None if the segment ended for another reason.
        end_reason: why the run is complete; '' if it is not.
    """

    step: int
    decisions: RunControl
    action: Rollback | Stop | None
    end_reason: str


class TrainingLoop:
    """Trains a run in this process, from its newest checkpoint to its end."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        prepared: PreparedStep,
        source: BatchSource,
        context: RunContext,
        heartbeats: Heartbeats,
    ):
        """Opens the run's services in `stack`."""
        self._stack, self._prepared, self._source, self._context = stack, prepared, source, context
        self._config, self._layout = prepared.config, prepared.layout
        self._recorder, self._timeline = context.recorder, context.recorder.timeline
        self._services = open_services(stack, prepared, source, context, heartbeats)
        self._watchdog, self._stop_request = self._services.watchdog, self._services.stop_request
        # Number of steps in the last line about the length that a budget gives.
        self._reported_length = 0
        self._checkpoints = RunCheckpoints(self._services.checkpoint_manager, prepared, source, context)

    def restore(self) -> tuple[TrainState, RunControl]:
        """Returns the state of the newest checkpoint, or the initial state, and the decisions of the run so far."""
        return self._checkpoints.restore()

    def setup(self, start: int, decisions: RunControl) -> None:
        """Opens the batch source and creates the loop's components, for a run that continues after step `start`."""
        self._context.describe(self._config, decisions, self._source.tokenizer_path)
        if start:
            self._recorder.record_event('resumed', f'resuming from step {start}', step=start, from_step=start)
        self._source.open(apply_control(self._config, decisions), self._layout)
        components = make_loop_components(
            self._stack, self._prepared, self._source, self._context, self._services, start=start, decisions=decisions
        )
        self._tasks, self._trackers, self._throughput, self._metric_logger, self._runner, self._budget = components

    def run_segment(self, state: TrainState, decisions: RunControl) -> Segment:
        """Trains until the run is complete, a stop is requested, or too many consecutive steps are bad."""
        config, metric_logger, watchdog = self._config, self._metric_logger, self._watchdog
        start = int(state.step)
        state_callbacks = [each for each in self._context.callbacks if isinstance(each, StateCallback)]
        state = self._set_length(state, decisions)
        with contextlib.ExitStack() as stack:
            alarm = partial(self._context.alerts.send, 'data')
            batches = stack.enter_context(
                self._source.batches(start, config, decisions, layout=self._layout, alarm=alarm, on_wait=self._on_wait)
            )
            self._begin(start, int(state.skipped))
            save_policy = SavePolicy(config.checkpoint, start=start)
            self._timeline.started()
            stack.enter_context(self._timeline.phase('step'))
            should_save = False
            if start == 0 and config.eval.interval and config.train.objective != 'next_token':
                # Post-training starts from a trained model, whose loss is the baseline.
                with watchdog.phase():
                    self._evaluate(0, state)
            for step in itertools.count(start + 1):
                try:
                    state = self._runner.step(step, state, batches, decisions, connects=step == start + 1)
                except (InputError, _StopWhileWaitingError) as error:
                    # The data is unreadable or not prepared yet. With several processes, all other processes wait for
                    # this one, so none of them can save.
                    if jax.process_count() == 1 and step > start + 1 and self._source.can_checkpoint_after(step - 1):
                        state = self._runner.settle(state)
                        self._checkpoints.save(step - 1, state, decisions, best_loss=metric_logger.best_loss)
                    if isinstance(error, InputError):
                        raise
                    if step == 1:
                        raise TerminatedError(f'{error} received before the first step; start again') from None
                    watchdog.finish()
                    return Segment(step - 1, decisions, None, '')

                num_steps = apply_control(config, decisions).train.num_steps
                due = [callback for callback in state_callbacks if _is_due(step, callback.every, num_steps)]
                should_save |= save_policy.should_save(step, num_steps=num_steps)
                if step < num_steps and not self._source.can_checkpoint_after(step):
                    # The source cannot restore the batches of the next steps.
                    continue
                stopping = self._stop_request.should_stop()
                # A stop request leaves little time, so the run saves its state and skips evaluations.
                evaluates = _is_due(step, config.eval.interval, num_steps) and (not stopping or step == num_steps)
                runs_tasks = _is_due(step, config.eval.tasks_interval, num_steps) and (
                    not stopping or step == num_steps
                )
                if stopping or should_save or evaluates or runs_tasks or due or step == num_steps:
                    # Waits for the device here, where the wait counts as time of the step.
                    state = self._runner.settle(state)
                action = None if stopping else self._check_bad_steps(decisions)
                if action:
                    watchdog.finish()
                    return Segment(step, decisions, action, '')
                loss = None
                with watchdog.phase():
                    if evaluates:
                        loss = self._evaluate(step, state)
                        decisions = after_evaluation(decisions, loss, config.guard)
                    if runs_tasks:
                        self._run_tasks(step, state)
                    if due and not stopping:
                        self._call_with_state(due, step, state, loss)
                    before = decisions
                    decisions = self._update_budget(step, decisions, look=should_save or stopping or evaluates)
                    if decisions.num_steps != before.num_steps:
                        state = self._set_length(state, decisions)
                    end_reason = ended(config, decisions, step)
                    if end_reason:
                        # A budget may end a run after any step.
                        state = self._runner.settle(state)
                    if end_reason and not (stopping or self._is_finite(loss)):
                        # An older checkpoint is better than this state, and a restart must not consider the run
                        # complete.
                        watchdog.finish()
                        reason = 'the loss or the parameters after the last step are not finite'
                        return Segment(step, decisions, Stop(reason), '')
                    # After bad steps the state is unchanged, and a checkpoint of it would replace a better one.
                    is_good = metric_logger.is_finite and not metric_logger.bad_steps.in_a_row
                    if end_reason or stopping or (should_save and is_good):
                        with self._throughput.paused('save'):
                            self._checkpoints.save(
                                step,
                                state,
                                decisions,
                                best_loss=metric_logger.best_loss,
                                validation_loss=loss,
                                required=bool(end_reason or stopping),
                            )
                        save_policy.record_save(step)
                        should_save = False
                if end_reason or stopping:
                    watchdog.finish()
                    return Segment(step, decisions, None, end_reason)
        raise AssertionError('a segment ends by its return')

    def roll_back(self, rollback: Rollback, decisions: RunControl) -> tuple[TrainState, RunControl]:
        """Returns the state of an older checkpoint, and decisions that skip the batches of the bad steps."""
        self._context.alerts.send(
            'rollback',
            f'steps up to {rollback.skip_to} spiked or were not finite: rolling back to step {rollback.step} and '
            f'skipping the batches of steps {rollback.skip_from + 1} to {rollback.skip_to} '
            f'(rollback {decisions.rollbacks + 1} of {self._config.guard.max_rollbacks})',
        )
        with self._watchdog.phase():
            return self._checkpoints.roll_back(rollback, decisions)

    def finish(self, segment: Segment) -> int:
        """Waits for the last checkpoint, logs the outcome of the run, and returns the exit code."""
        with self._timeline.phase('checkpoint'):
            saved = self._checkpoints.wait()
        newest = 'there is no checkpoint' if saved is None else f'the newest checkpoint is from step {saved}'
        if isinstance(segment.action, Stop):
            text = f'stopped at step {segment.step}: {segment.action.reason}; {newest}'
            self._context.alerts.send('diverged', text)
            return EXIT_FAILED
        if saved != segment.step:
            text = f'step {segment.step} could not be saved; {newest}'
            self._context.alerts.send('checkpoint', text)
            self._recorder.set_outcome('failed', text, EXIT_FAILED)
            return EXIT_FAILED
        num_steps = apply_control(self._config, segment.decisions).train.num_steps
        if not segment.end_reason:
            text = f'{self._stop_request.requested}: saved step {segment.step} of {num_steps}; start again to resume'
            logger.info(text)
            self._recorder.set_outcome('preempted', text, EXIT_PREEMPTED)
            return EXIT_PREEMPTED
        self._recorder.set_outcome('finished', segment.end_reason, EXIT_DONE)
        budget = budget_spent(segment.decisions, self._config)
        if self._config.by_budget and budget and budget.fraction >= 1 and segment.step < num_steps:
            logger.warning(
                f'{budget.name} was spent before the end of the schedule, so the learning rate did not reach its '
                'minimum; set train.num_steps for such a short run'
            )
        log_end(
            segment.step,
            segment.end_reason,
            source=self._source,
            metric_logger=self._metric_logger,
            throughput=self._throughput,
            spent=self._recorder.metrics(segment.step, num_steps),
            by_category=self._timeline.read(),
            seconds=time.monotonic() - self._timeline.origin,
        )
        return EXIT_DONE

    def _on_wait(self, has_progressed: bool) -> None:
        """Called while a step waits for data in preparation. Progress of the preparation counts as that of the run."""
        if has_progressed:
            self._watchdog.step_done()
        # Several processes can only stop together after a step.
        if self._stop_request.requested and jax.process_count() == 1:
            raise _StopWhileWaitingError(self._stop_request.requested)

    def _begin(self, start: int, skipped: int) -> None:
        """Starts the clocks and the metrics file of a segment after step `start`."""
        writer, best_loss = self._context.open_metrics(start, self._trackers.trackers, self._call_back)
        best_loss = min(best_loss, self._checkpoints.best_loss)
        self._metric_logger.begin(start, writer=writer, skipped=skipped, best_loss=best_loss)
        self._budget.begin(start)
        self._recorder.begin(start, lambda: (self._metric_logger.step, self._checkpoints.latest_step()))
        self._throughput.start()
        self._watchdog.start()

    def _call_back(self, step: int, values: Mapping[str, float]) -> None:
        for callback in self._context.callbacks:
            if not isinstance(callback, StateCallback) and call_back(callback, step, dict(values)):
                self._stop_request.request('stopped by a callback')

    def _call_with_state(
        self, callbacks: Sequence[StateCallback], step: int, state: TrainState, loss: float | None
    ) -> None:
        metrics = self._metric_logger.step_metrics | ({} if loss is None else {'eval/loss': loss})
        with self._throughput.paused('callback'), self._timeline.phase('other'):
            for callback in callbacks:
                if call_back(callback.function, step, dict(metrics), state):
                    self._stop_request.request('stopped by a callback')

    def _evaluate(self, step: int, state: TrainState) -> float:
        """Evaluates and samples the model; returns the validation loss."""
        with self._throughput.paused('eval'), self._timeline.phase('evaluation'):
            result = self._source.evaluate(state)
            text = self._metric_logger.evaluated(step, result)
            self._metric_logger.sampled(step, self._source.sample(evaluated_params(state)))
        self._recorder.record_event('evaluated', text, step=step, loss=result.loss)
        return result.loss

    def _run_tasks(self, step: int, state: TrainState) -> None:
        """Runs the benchmarks of `eval.tasks`."""
        assert self._tasks, 'setup() opens them if eval.tasks_interval is set'
        with self._throughput.paused('eval', name='tasks'), self._timeline.phase('evaluation'):
            scores = self._tasks(evaluated_params(state))
            self._metric_logger.wrote(step, scores, task_text(scores))

    def _set_length(self, state: TrainState, decisions: RunControl) -> TrainState:
        """Returns the state with the schedule progress of the decided length if a budget gives the run length."""
        if not self._config.by_budget:
            return state
        self._metric_logger.change_config(apply_control(self._config, decisions))
        return with_progress(state, progress_of(decisions, self._config), self._layout)

    def _is_finite(self, validation_loss: float | None) -> bool:
        return self._metric_logger.is_finite and (validation_loss is None or math.isfinite(validation_loss))

    def _check_bad_steps(self, decisions: RunControl) -> Rollback | Stop | None:
        bad_steps = self._metric_logger.bad_steps
        if bad_steps.in_a_row < self._config.guard.max_consecutive_skips:
            return None
        return on_bad_steps(decisions, bad_steps, self._checkpoints.rollback_steps(), self._config)

    def _update_budget(self, step: int, decisions: RunControl, *, look: bool) -> RunControl:
        """Adds the time and money of a step to the decisions, and updates the run length if a budget gives it."""
        before = budget_spent(decisions, self._config)
        after = self._budget.after(step, decisions, look=look)
        budget = budget_spent(after, self._config)
        if budget and budget.alert and not (before and before.alert):
            self._context.alerts.send('budget', f'{budget.fraction:.0%} of {budget.name} is spent')
        if after.num_steps != decisions.num_steps:
            self._context.describe(self._config, after, self._source.tokenizer_path)
            self._metric_logger.change_config(apply_control(self._config, after))
            if abs(after.num_steps - self._reported_length) > LENGTH_CHANGE * after.num_steps:
                self._reported_length = after.num_steps
                text = (
                    f'at {after.step_seconds:.3g} s per step the budget allows {after.num_steps} steps; '
                    'the schedule ends there'
                )
                logger.info(f'step {step:>7}  {text}')
                self._recorder.record_event('length', text, step=step, num_steps=after.num_steps)
            if not decisions.num_steps:
                self._metric_logger.log_sources(after.num_steps)
        return after


def _is_due(step: int, interval: int, num_steps: int) -> bool:
    return interval > 0 and (step % interval == 0 or step == num_steps)
