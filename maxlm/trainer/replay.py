"""Replays steps: computes them again from the same state and batch, and ends the run if a device computed wrongly.

A scheduled replay (`guard.replay_fraction`) keeps a copy of the state before the step. A step with a spike or a
non-finite value needs no copy, because it changes only counters of the state. It is replayed when its metrics are
read. By then the next step runs on the devices. That step therefore receives the metric `bad` of the step before it as
HOLD, and leaves the state unchanged if the metric is True. The run dispatches it again after the replay.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.checkpoint.checksums import start_checksums
from maxlm.checkpoint.item_metadata import named_leaves
from maxlm.config.schema import Config
from maxlm.errors import DeviceError
from maxlm.log import logger
from maxlm.parallel.layout import Layout
from maxlm.telemetry.run_recorder import RunRecorder
from maxlm.trainer.metric_logger import MetricLogger
from maxlm.trainer.throughput import Throughput
from maxlm.training.batch import HOLD, Batch
from maxlm.training.decisions.replay import Cause, Rounding, StepResult, find_cause, is_replayed
from maxlm.training.state import Metrics, TrainState

REASONS = {
    Cause.DATA: 'the results are equal, so the data or the optimizer is the cause',
    Cause.NONDETERMINISM: 'the results differ by rounding; train.deterministic=true avoids it',
    Cause.DEVICE: 'the results differ, so a device computed one of them wrongly',
}
# Maximum number of devices, arrays and checkpoints in a message.
_MAX_NAMES = 3


class Execution(NamedTuple):
    """A step that was executed.

    Attributes:
        step: number of the step, from 1.
        program: the compiled step, with HOLD.
        make_batch: returns the batch on the devices, without HOLD.
        metrics: its metrics.
    """

    step: int
    program: Any
    make_batch: Callable[[], Batch]
    metrics: Metrics


class Replays:
    """Executes the steps of a run, some of them twice.

    All processes call the methods together and compare the same global values, so they agree on the result.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        metric_logger: MetricLogger,
        recorder: RunRecorder,
        throughput: Throughput,
        saved_steps: Callable[[], list[int]],
    ):
        """
        Args:
            config: resolved config.
            layout: layout of the run's devices.
            metric_logger: reads the metrics of steps, and counts bad steps.
            recorder: records events and the time of replays.
            throughput: excludes the time of replays from that of steps.
            saved_steps: returns the steps of the checkpoints.
        """
        self._config, self._layout = config, layout
        self._metric_logger, self._recorder, self._throughput = metric_logger, recorder, throughput
        self._saved_steps = saved_steps
        self._go = jax.device_put(np.bool_(False), layout.named())
        # Some kernels of GPUs add in a varying order.
        self._is_deterministic = layout.platform != 'gpu' or config.train.deterministic
        self._start = 0
        # The last step, unless it was replayed.
        self._last: Execution | None = None
        # The last step whose two executions were equal, and the checksums of the state after it.
        self._verified: tuple[int, np.ndarray] | None = None
        self._num_replayed = self._num_different = 0
        self._loss_difference = 0.0

    def begin(self, start: int) -> None:
        """Forgets earlier steps. Called before the first step after a start or a rollback, with the step before it."""
        self._start, self._last, self._verified = start, None, None

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the `replay/…` metrics; none before the first replay, unless replays are scheduled."""
        if not (self._num_replayed or self._config.guard.replay_fraction):
            return {}
        return {
            'replay/steps': float(self._num_replayed),
            'replay/differences': float(self._num_different),
            'replay/loss_difference': self._loss_difference,
        }

    def step(
        self, step: int, program: Any, state: TrainState, make_batch: Callable[[], Batch]
    ) -> tuple[TrainState, Metrics]:
        """Dispatches a step, reports the step before it, and replays both if necessary.

        Args:
            step: number of the step, from 1.
            program: the compiled step, with HOLD.
            state: state before the step. It is donated.
            make_batch: returns the batch on the devices, without HOLD.

        Returns:
            The state after the step and its metrics.

        Raises:
            DeviceError: a device computed a step wrongly, or the state has changed in memory.
        """
        guard, seed = self._config.guard, self._config.train.seed
        if is_replayed(step, fraction=guard.replay_fraction, seed=seed):
            return self._execute_twice(step, program, self.settle(state), make_batch)
        hold = self._go
        if self._metric_logger.running is None:
            state = self._replay_if_bad(state)
        elif self._last and not self._metric_logger.bad_steps.in_a_row:
            # Only the first of consecutive bad steps is replayed, because a replay takes the time of two steps, and a
            # diverging run has many bad steps.
            hold = self._last.metrics['bad']
        execution, state = self._execute(step, program, state, make_batch, hold)
        self._metric_logger.flush()
        if self._is_suspicious():
            state = self._replay_if_bad(state)
            execution, state = self._execute(step, program, state, make_batch, self._go)
        self._last = execution
        return state, execution.metrics

    def settle(self, state: TrainState) -> TrainState:
        """Waits for the last step, reports it, replays it if it is bad, and returns the state after it.

        Raises:
            DeviceError: as `step`.
        """
        self._metric_logger.flush()
        return self._replay_if_bad(state)

    def _execute(
        self, step: int, program: Any, state: TrainState, make_batch: Callable[[], Batch], hold: jax.Array
    ) -> tuple[Execution, TrainState]:
        # Only the batch moves to the device, with an explicit transfer. An implicit one would stall every step.
        with jax.transfer_guard('disallow'):
            state, metrics = program(state, {**make_batch(), HOLD: hold})
        return Execution(step, program, make_batch, metrics), state

    def _execute_twice(
        self, step: int, program: Any, state: TrainState, make_batch: Callable[[], Batch]
    ) -> tuple[TrainState, Metrics]:
        with self._paused():
            # The reference never changes, so both executions use the same arrays.
            copy = _copy(state._replace(reference=None))
            if self._verified and self._verified[0] == step - 1:
                self._check_memory(step, copy, self._verified[1])
            jax.block_until_ready(copy)
        first, state = self._execute(step, program, state, make_batch, self._go)
        jax.block_until_ready(first.metrics)
        with self._paused():
            checksums = _checksums(state)
            again, replayed = self._execute(
                step, program, copy._replace(reference=state.reference), make_batch, self._go
            )
            state = state._replace(reference=replayed.reference)
            self._compare(first, again, (checksums, _checksums(replayed)), _names(state))
            self._verified = step, checksums
        self._last = None
        return state, first.metrics

    def _is_suspicious(self) -> bool:
        """Returns True if the last step is the first bad one, and not replayed yet."""
        bad = self._metric_logger.bad_steps
        return self._last is not None and bad.in_a_row == 1 and bad.last == self._last.step

    def _replay_if_bad(self, state: TrainState) -> TrainState:
        """Replays the last step if it is the first bad one. All steps until then are reported.

        The state is that after the bad step. Except for the counters, it is also that before the step.
        """
        if not self._is_suspicious():
            return state
        first, self._last = self._last, None
        assert first is not None
        with self._paused():
            skipped = int(jax.device_get(state.skipped))
            counters = jax.device_put((np.int32(first.step - 1), np.int32(skipped - 1)), self._layout.named())
            spike_window = state.spike_window
            if spike_window is not None:
                spike_window = spike_window._replace(filled=first.metrics['window_steps'])
            before = state._replace(step=counters[0], skipped=counters[1], spike_window=spike_window)
            again, state = self._execute(first.step, first.program, before, first.make_batch, self._go)
            self._compare(first, again)
        return state

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        with self._throughput.paused('replay'), self._recorder.timeline.phase('replay'):
            yield

    def _compare(
        self,
        first: Execution,
        again: Execution,
        checksums: tuple[np.ndarray, np.ndarray] = (np.empty((0, 0)), np.empty((0, 0))),
        names: Sequence[str] = (),
    ) -> None:
        """Compares two executions of a step, and reports a bad step or a difference.

        Raises:
            DeviceError: the results differ by more than rounding.
        """
        one, other = (_result(each.metrics, sums) for each, sums in zip((first, again), checksums, strict=True))
        cause = find_cause(one, other, dtype=self._config.model.dtype, is_deterministic=self._is_deterministic)
        is_bad = bool(first.metrics['bad'])
        self._num_replayed += 1
        if cause is Cause.DATA and not is_bad:
            return
        step, is_first = first.step, not self._num_different
        if cause is not Cause.DATA:
            self._num_different += 1
            self._loss_difference = abs(one.loss - other.loss)
        values = f'loss {_both(one.loss, other.loss)}, gradient norm {_both(one.grad_norm, other.grad_norm)}'
        if names:
            values += f', {self._differing(*checksums, names)}'
        text = f'computed twice: {REASONS[cause]} ({values})'
        if is_bad or is_first or cause is Cause.DEVICE:
            # Events of every step would fill the log of a run that replays all steps with rounding.
            self._recorder.record_event(
                'replayed', text, step=step, cause=str(cause), loss=_finite(one.loss), replayed_loss=_finite(other.loss)
            )
            logger.log(logging.WARNING if cause is Cause.NONDETERMINISM else logging.INFO, f'step {step:>7}  {text}')
        if cause is Cause.DEVICE:
            raise DeviceError(f'step {step} {text}; {self._suspects(step)}')

    def _check_memory(self, step: int, state: TrainState, expected: np.ndarray) -> None:
        found = _checksums(state)
        if np.array_equal(found, expected):
            return
        self._num_different += 1
        text = f'the state changed in memory: {self._differing(expected, found, _names(state))}'
        self._recorder.record_event('replayed', text, step=step - 1, cause=str(Cause.DEVICE))
        # Unlike a wrong result, which the next collective spreads, this is where it happened.
        at_fault = {device.process_index for device in self._devices(expected, found)}
        raise DeviceError(f'after step {step - 1} {text}; {self._suspects(step)}', tuple(sorted(at_fault)))

    def _devices(self, one: np.ndarray, other: np.ndarray) -> list[jax.Device]:
        """Returns the devices whose checksums differ."""
        return list(self._layout.mesh.devices.flat[np.any(one != other, axis=1)])

    def _differing(self, one: np.ndarray, other: np.ndarray, names: Sequence[str]) -> str:
        """Returns the arrays and the devices whose checksums differ."""
        arrays = [name for name, differs in zip(names, np.any(one != other, axis=0), strict=True) if differs]
        devices = [str(device.id) for device in self._devices(one, other)]
        text = f'{len(arrays)} of {len(names)} arrays differ'
        return f'{text} ({_some(arrays)}) on device {_some(devices)}' if arrays else text

    def _suspects(self, step: int) -> str:
        """Returns the host, its devices, and the checkpoints that may be damaged, for a message."""
        since = self._verified[0] if self._verified else self._start
        damaged = [str(saved) for saved in self._saved_steps() if since < saved < step]
        checked = 'the last one with two equal results' if self._verified else 'the first one of this attempt'
        devices = [f'{device.id} ({device.device_kind})' for device in jax.local_devices()]
        return (
            f'host {socket.gethostname()} (process {jax.process_index()} of {jax.process_count()}) has device '
            f'{_some(devices)}; checkpoints after step {since}, {checked}, may be damaged too '
            f'({_some(damaged) or "there are none"}); check the host with maxlm doctor, or use another one'
        )


def _copy(state: TrainState) -> TrainState:
    """Returns a copy of the state in the same memory."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)


def _compared(state: TrainState) -> TrainState:
    # A budget changes the progress between two steps.
    return state._replace(reference=None, progress=None)


def _names(state: TrainState) -> list[str]:
    return sorted(named_leaves(_compared(state)))


def _checksums(state: TrainState) -> np.ndarray:
    """Returns uint32 [devices, arrays]: checksums of the arrays of a state on each device, in the order of `_names`."""
    return np.asarray(jax.device_get(start_checksums({'state': _compared(state)})['state']))


def _result(metrics: Metrics, checksums: np.ndarray) -> StepResult:
    values = jax.device_get({name: metrics[name] for name in Rounding._fields})
    return StepResult(checksums=checksums, **{name: float(value) for name, value in values.items()})


def _finite(value: float) -> float | str:
    # JSON has neither NaN nor infinity.
    return value if math.isfinite(value) else str(value)


def _both(first: float, second: float) -> str:
    """Returns two values with all digits of float32."""
    return f'{first:.9g} and {second:.9g}'


def _some(names: Sequence[str]) -> str:
    return ', '.join(names[:_MAX_NAMES]) + (', …' if len(names) > _MAX_NAMES else '')
