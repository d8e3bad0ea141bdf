"""Writes the event log and the goodput log of a run.

Process 0 writes WORKDIR/events.jsonl and goodput.jsonl. Process N writes goodput-N.jsonl. A line of the goodput log
contains the seconds by category since the process began. Lines are written at every save and rollback, at the end, and
every few seconds in between, because a killed attempt has no last line. `maxlm.telemetry.goodput` reads the lines.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from maxlm.errors import (
    EXIT_BAD_INPUT,
    EXIT_DEVICE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    DeviceError,
    InputError,
    TerminatedError,
    os_message,
)
from maxlm.hardware.prices import Price
from maxlm.log import logger
from maxlm.storage.jsonl import JsonlWriter, read_lines, truncation_note
from maxlm.telemetry import events
from maxlm.telemetry.cost import HOUR, cost_metrics
from maxlm.telemetry.events import Events
from maxlm.telemetry.goodput import PRODUCTIVE, STEP_CATEGORIES, attempts_of, compact, idle_seconds
from maxlm.telemetry.timeline import Timeline
from maxlm.workdir.files import EVENTS_FILE, goodput_name

# Categories of the training loop; their sum over steps is the time per step.
_LOOP_CATEGORIES = (*STEP_CATEGORIES, 'checkpoint')
# Number of heartbeat lines after which the file is compacted.
_MAX_HEARTBEATS = 1000
_CLOSE_SECONDS = 5.0
_MAX_MESSAGE_CHARS = 300


class RunRecorder:
    """Writes the goodput log every few seconds while the context is entered, and the last line and event on exit.

    Attributes:
        timeline: timeline of this process.
        attempt: number of this attempt of the run, from 1.
        price: hourly price of one device, if known.
        previous_seconds: duration of the earlier attempts, without the time between them.
    """

    def __init__(
        self,
        workdir: Path,
        timeline: Timeline,
        *,
        interval_seconds: float,
        num_devices: int,
        price: Price | None = None,
        process: int = 0,
        is_only_process: bool = True,
        agree: Callable[[int], int] = lambda attempt: attempt,
    ):
        """
        Args:
            workdir: workdir of the run. Unreadable files are renamed and failed writes are logged, so that telemetry
                never ends a run.
            timeline: timeline of this process.
            interval_seconds: time between two lines of the goodput log; 0 = only at saves, rollbacks and the end.
            num_devices: number of devices of the run.
            price: hourly price of one device.
            process: index of this process.
            is_only_process: True if the run has one process. Otherwise a lost process may have caused an error, and
                `Heartbeats` reports it by calling `record_exit`.
            agree: maps the attempt number of this process to that of all processes.
        """
        self.timeline, self.price = timeline, price
        self._process, self._is_only_process, self._interval_seconds = process, is_only_process, interval_seconds
        self._dollars_per_hour = None if price is None else price.dollars * num_devices
        path = workdir / goodput_name(process)
        self._lines = compact(_read(path, attempts_of))
        event_lines = [] if process else _read(workdir / EVENTS_FILE, _last_attempt)
        self.attempt = agree(1 + max(_last_attempt(self._lines), _last_attempt(event_lines)))
        attempts = attempts_of(self._lines)
        # Measured by clocks that do not jump, unlike the times of the lines.
        self.previous_seconds = sum(attempt.active_seconds for attempt in attempts)
        self._previous_dollars = sum(attempt.dollars or 0.0 for attempt in attempts)
        self._idle_seconds = sum(attempt.seconds['idle'] for attempt in attempts)
        if attempts:
            self._idle_seconds += idle_seconds(attempts[-1].time, timeline.start_time)
        self._events = None if process else Events(workdir, self.attempt)
        self._writer = JsonlWriter(path)
        if self._lines:
            self._writer.replace(self._lines)
        self._num_heartbeats = 0
        self._position: Callable[[], tuple[int | None, int | None]] = lambda: (None, None)
        self._start_step: int | None = None
        # Productive seconds of the run at the start of the current segment, minus those of this attempt.
        self._productive_seconds = 0.0
        self._segment_step, self._segment_seconds = 0, 0.0
        self._outcome: tuple[str, str, dict[str, Any]] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_heartbeats, daemon=True, name='run-recorder')

    @property
    def step(self) -> int | None:
        """Last finished step, or None before `begin`."""
        return self._position()[0]

    @property
    def has_begun(self) -> bool:
        """True if this attempt has begun its first step."""
        return self._start_step is not None

    def record_event(self, kind: str, message: str, *, step: int | None = None, **extra: Any) -> None:
        """Writes an event, in process 0 only."""
        if self._events:
            self._events.add(kind, message, step=self.step if step is None else step, **extra)

    def record_alert(self, kind: str, message: str) -> None:
        """Records an alert. If it states the reason for the end of the attempt, it becomes the last event."""
        if kind in events.ENDS:
            self.set_outcome(kind, message, EXIT_FAILED, alert=True)
        else:
            self.record_event(kind, message, alert=True)

    def set_outcome(self, kind: str, message: str, code: int, **extra: Any) -> None:
        """Sets the last event of this attempt. Only the first call has an effect."""
        self._outcome = self._outcome or (kind, message, {**extra, 'code': code})

    def begin(self, step: int, position: Callable[[], tuple[int | None, int | None]]) -> None:
        """Starts a segment of the run after `step`.

        Args:
            step: last finished step.
            position: returns, in any thread, the last finished step and the newest complete checkpoint, if any.
        """
        if self._start_step is None:
            self._start_step = step
        self._position = position
        now = self._line('beat')
        so_far = attempts_of([*self._lines, now])
        self._productive_seconds = sum(_productive(each.seconds) for each in so_far) - _productive(now['seconds'])
        self._segment_step, self._segment_seconds = step, self._loop_seconds(now['seconds'])

    def record_save(self) -> None:
        """Records that the save of a step has started."""
        self._write('saved')

    def record_rollback(self, step: int) -> None:
        """Records that the run continues from an older step."""
        self._write('rollback', step=step)

    def metrics(self, step: int, num_steps: int | None) -> dict[str, float]:
        """Returns the `cost/…` and `goodput/…` metrics after a step. `num_steps` is None if it is not known yet."""
        seconds = self.timeline.read()
        elapsed = sum(seconds.values())
        seconds_left = math.nan
        if num_steps is not None and step > self._segment_step:
            seconds_per_step = (self._loop_seconds(seconds) - self._segment_seconds) / (step - self._segment_step)
            seconds_left = max(0, num_steps - step) * seconds_per_step
        return {
            **cost_metrics(
                self.previous_seconds + elapsed,
                self._dollars(elapsed, include_previous=True),
                dollars_per_hour=self._dollars_per_hour or 0.0,
                seconds_left=seconds_left,
            ),
            'goodput/fraction': (self._productive_seconds + _productive(seconds))
            / (self.previous_seconds + self._idle_seconds + elapsed),
        }

    def __enter__(self) -> RunRecorder:
        # Makes the new attempt visible.
        self._write('beat')
        if self._interval_seconds:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            if not self._is_only_process and not isinstance(error, InputError | KeyboardInterrupt):
                return
            self._record_failure(error)
        self._close()

    def record_exit(self, code: int, reason: str) -> None:
        """Writes the last event and line before a thread exits the process."""
        self._override_outcome('preempted' if code == EXIT_PREEMPTED else 'failed', reason, code)
        # Uses a thread with a timeout, because an unresponsive disk must not prevent the exit.
        closing = threading.Thread(target=self._close, daemon=True, name='run-recorder-close')
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _record_failure(self, error: BaseException) -> None:
        if isinstance(error, TerminatedError):
            self._override_outcome('preempted', str(error), EXIT_PREEMPTED)
            return
        code = EXIT_FAILED
        if isinstance(error, InputError):
            code = EXIT_BAD_INPUT
        elif isinstance(error, DeviceError):
            code = EXIT_DEVICE
        elif isinstance(error, KeyboardInterrupt):
            code = EXIT_INTERRUPTED
        kind = '' if isinstance(error, InputError | DeviceError) else f'{type(error).__name__}: '
        self._override_outcome('failed', f'{kind}{error}', code)

    def _override_outcome(self, kind: str, message: str, code: int) -> None:
        """Replaces an earlier outcome. If that was the alert of the same kind, only adds the exit code."""
        if self._outcome and self._outcome[0] == kind:
            self._outcome[2]['code'] = code
        else:
            self._outcome = kind, message[:_MAX_MESSAGE_CHARS], {'code': code}

    def _close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        if self._outcome:
            kind, message, extra = self._outcome
            self.record_event(kind, message, **extra)
        self._write('end')

    def _write_heartbeats(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._write('beat')

    def _write(self, reason: str, *, step: int | None = None) -> None:
        with self._lock:
            if self._stop.is_set() and reason != 'end':
                return
            line = self._line(reason)
            if step is not None:
                line['step'] = step
            self._writer.write(line)
            if reason != 'beat':
                # `compact` keeps these lines, and the last line of an attempt.
                self._lines.append(line)
                self._num_heartbeats = 0
                return
            self._num_heartbeats += 1
            if self._num_heartbeats >= _MAX_HEARTBEATS:
                self._num_heartbeats = 0
                self._writer.replace([*self._lines, line])

    def _line(self, reason: str) -> dict[str, Any]:
        seconds = {name: round(value, 4) for name, value in self.timeline.read().items()}
        elapsed = sum(seconds.values())
        step, saved_step = self._position()
        dollars = self._dollars(elapsed)
        return {
            'time': round(time.time(), 3),
            'life': self.attempt,
            'process': self._process,
            'host': socket.gethostname(),
            'began': round(self.timeline.start_time, 3),
            'step': step,
            'saved_step': saved_step,
            'start_step': self._start_step,
            'seconds': seconds,
            # Process 0 reports the cost of all devices, so other processes must not count it again.
            'dollars': None if dollars is None or self._process else round(dollars, 6),
            'why': reason,
        }

    def _dollars(self, seconds: float, *, include_previous: bool = False) -> float | None:
        if self._dollars_per_hour is None:
            return None
        return seconds / HOUR * self._dollars_per_hour + (self._previous_dollars if include_previous else 0.0)

    def _loop_seconds(self, seconds: dict[str, float]) -> float:
        return sum(seconds[name] for name in _LOOP_CATEGORIES)


def _read(path: Path, check: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
    """Reads the lines of a file. Renames a corrupt file, which must not stop a run."""
    try:
        lines, truncated = read_lines(path)
        check(lines)
    except (InputError, KeyError, TypeError) as error:
        backup = path.with_name(f'{path.name}.damaged')
        path.replace(backup)
        logger.warning(f'{path.name} is damaged ({error}); renamed it to {backup.name}, the run continues without it')
        return []
    except OSError as error:
        logger.warning(f'{path.name} cannot be read ({os_message(error)}); the run continues without it')
        return []
    if truncated:
        logger.info(truncation_note(path.name))
    return lines


def _productive(seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(category, 0.0) for category in PRODUCTIVE)


def _last_attempt(lines: list[dict[str, Any]]) -> int:
    return max((int(line['life']) for line in lines), default=0)
