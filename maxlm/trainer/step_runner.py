"""Runs training steps: selects the compiled step, fetches the batch and measures data waits."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import jax

from maxlm.config.schema import Config
from maxlm.data.loader.windows import Batch
from maxlm.log import logger
from maxlm.runtime.watchdog import Watchdog
from maxlm.telemetry.profiler import Profile
from maxlm.telemetry.run_recorder import RunRecorder
from maxlm.telemetry.timeline import Timeline
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.metric_logger import MetricLogger
from maxlm.trainer.preflight import PreparedStep
from maxlm.trainer.replay import Replays
from maxlm.trainer.throughput import Throughput
from maxlm.training.compile import CompiledStep, compile_train_step
from maxlm.training.decisions.run_control import RunControl, apply_control, with_rates
from maxlm.training.flops import step_flops
from maxlm.training.state import TrainState

# Fetching a batch that is ready takes less time.
_LATE_SECONDS = 1e-3
_CLOSE_SECONDS = 5.0

# A jax.Array, whose type annotations lack `is_ready`.
Running = Any


class DataWait:
    """Context manager that takes batches from an iterator and records the time the device waits for them.

    A late batch costs nothing while the device still runs the previous step. While batches are late, a thread detects
    when the device becomes idle. Otherwise the thread sleeps, because waking it would delay the steps on a CPU. For
    the first late batch, the end of the running step is estimated from the durations of previous steps.
    """

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._queue: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        # The array that became ready last, and the time.
        self._ready: tuple[Running | None, float] = None, 0.0
        self._too_late = False
        self._requested: float | None = None
        # Seconds between batches that were in time.
        self._steps: deque[float] = deque(maxlen=8)
        self._thread = threading.Thread(target=self._watch, daemon=True, name='data-wait')

    def __enter__(self) -> DataWait:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        # Python aborts if it exits while a thread is in JAX. With the timeout, a stuck device cannot block the exit.
        self._thread.join(_CLOSE_SECONDS)

    def next_batch(self, batches: Iterator[Batch], running: Running | None) -> tuple[Batch, float]:
        """Returns the next batch and the seconds until it was available, during which the device may have been busy.

        Args:
            batches: iterator over the batches. Its exceptions are propagated.
            running: a result of the last dispatched step; None if no step is running.
        """
        requested = self._timeline.now()
        if self._requested is not None and not self._too_late:
            self._steps.append(requested - self._requested)
        self._requested = requested
        busy = running is not None and not running.is_ready()
        watched = busy and self._too_late
        if watched:
            self._queue.put(running)
        with self._timeline.phase('data_wait'):
            batch = next(batches)
        arrived = self._timeline.now()
        idle_since = requested
        if running is not None and busy:
            idle_since = self._idle_since(running, requested, arrived, watched=watched)
            self._timeline.move(idle_since - requested, 'data_wait', 'step')
        self._too_late = arrived - idle_since > _LATE_SECONDS
        return batch, arrived - requested

    def _idle_since(self, running: Running, requested: float, arrived: float, *, watched: bool) -> float:
        """Returns the time at which a busy device became idle, at most `arrived`."""
        if watched:
            array, ready = self._ready
            return min(ready, arrived) if array is running else arrived
        if not running.is_ready():
            return arrived
        return min(requested + min(self._steps, default=0.0), arrived)

    def _watch(self) -> None:
        while (array := self._queue.get()) is not None:
            # Errors of the step are raised where its metrics are read.
            with contextlib.suppress(Exception):
                array.block_until_ready()
            self._ready = array, self._timeline.now()


class StepRunner:
    """Runs the steps of a run."""

    def __init__(
        self,
        ready: PreparedStep,
        source: BatchSource,
        *,
        data_wait: DataWait,
        recorder: RunRecorder,
        watchdog: Watchdog,
        profile: Profile,
        metric_logger: MetricLogger,
        throughput: Throughput,
        replays: Replays,
    ):
        self._config, self._layout, self._abstract, forecast = ready
        self._program: tuple[Config, CompiledStep | None] = forecast.config, forecast.compiled
        self._source, self._data_wait, self._recorder, self._timeline = source, data_wait, recorder, recorder.timeline
        self._watchdog, self._profile, self._throughput = watchdog, profile, throughput
        self._metric_logger = metric_logger
        self._replays = replays
        # Seconds of steps until the last rollout.
        self._trained = 0.0

    def step(
        self, step: int, state: TrainState, batches: Iterator[Batch], decisions: RunControl, *, connects: bool
    ) -> TrainState:
        """Returns the state after the next batch.

        `connects` is True for the first step, which connects the processes and may take long.

        Raises:
            DeviceError: a replay has found that a device computes wrongly.
        """
        if connects:
            self._replays.begin(step - 1)
        compiled = self._compiled_for(step, decisions)
        if self._profile.should_start(step):
            self._while_idle(state, partial(self._profile.start, step))
        if self._source.has_work_before(step):
            self._prepare(step, state)
        # With shorter sequences a batch has more rows.
        rows = self._program[0].train.global_batch_size
        batch, data_wait = self._data_wait.next_batch(batches, self._metric_logger.running)
        # Dispatch may also wait for other processes.
        with self._watchdog.phase() if connects else self._watchdog.waiting():
            state, metrics = self._replays.step(step, compiled, state, partial(self._layout.put_batch, batch, rows))
            if connects:
                jax.block_until_ready(metrics)
        with self._watchdog.waiting():
            self._metric_logger.submit(step, metrics, data_wait, lambda: self._batch_metrics(batch))
        if self._profile.should_stop(step):
            self._while_idle(state, partial(self._profile.stop, step))
        self._watchdog.step_done()
        return state

    def settle(self, state: TrainState) -> TrainState:
        """Waits for the last step and reports it; see `Replays.settle`."""
        with self._watchdog.waiting():
            return self._replays.settle(state)

    def _batch_metrics(self, batch: Batch) -> dict[str, float]:
        return {**self._source.batch_metrics(batch), **self._replays.metrics}

    def _while_idle(self, state: TrainState, act: Callable[[], None]) -> None:
        """Calls `act` while the devices are idle between two steps, without counting its time as time of a step."""
        with self._watchdog.waiting():
            self._metric_logger.flush()
            jax.block_until_ready(state)
        with self._throughput.paused('profile'), self._timeline.phase('other'), self._watchdog.phase():
            act()

    def _prepare(self, step: int, state: TrainState) -> None:
        """Lets the source generate batches from the state."""
        with self._watchdog.waiting():
            self._metric_logger.flush()
        trained, self._trained = self._trained, self._timeline.read()['step']
        with self._throughput.paused('rollout'), self._timeline.phase('rollout'), self._watchdog.phase():
            written = self._source.prepare(step, state)
        for category, seconds in written.waits.items():
            self._timeline.move(seconds, 'rollout', category)
        metrics = {**written.metrics, 'rollout/train_seconds': self._trained - trained}
        self._metric_logger.wrote(step, metrics, written.text)
        self._metric_logger.sampled(step, written.samples)

    def _compiled_for(self, step: int, decisions: RunControl) -> jax.stages.Compiled:
        """Returns the compiled step, which is recompiled after a change of the sequence length or learning rates."""
        now = with_rates(self._config, decisions)
        latest = now.at_context(now.context_at(step - 1))
        before, compiled = self._program
        if compiled is None or latest != before:
            # The last dispatched step still belongs to the old program.
            with self._watchdog.waiting():
                self._metric_logger.flush()
            with self._throughput.paused('compile'), self._timeline.phase('compile'), self._watchdog.phase():
                compiled = compile_train_step(latest, self._layout, self._abstract, len(self._source.names), holds=True)
            self._recorder.record_event(
                'compiled', f'the training step in {compiled.seconds:.1f} s', seconds=compiled.seconds
            )
            self._throughput.change_flops(step_flops(now, latest.data.seq_len))
            self._metric_logger.change_config(apply_control(self._config, decisions))
            if latest.data.seq_len != before.data.seq_len:
                text = f'the sequence length is now {latest.data.seq_len} tokens'
                logger.info(f'step {step:>7}  {text}')
                self._recorder.record_event('context', text, window=latest.data.seq_len)
            self._program = latest, compiled
        return compiled.step
