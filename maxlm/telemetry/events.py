"""Event log of a run: WORKDIR/events.jsonl.

Kinds: `started`, `resumed`, `compiled`, `evaluated`, `saved`, `length`, `context`, `batch`, `schedule`, `replayed`,
`export`, `exported` and those of alerts, which have `"alert": true`. The last line of each attempt is one of `ENDS`
with the exit code in `code`. An attempt without such a line is running or was killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxlm.storage.jsonl import JsonlFile, JsonlWriter, read_lines
from maxlm.workdir.files import EVENTS_FILE

ENDS = ('finished', 'preempted', 'failed', 'diverged')


class Events:
    """Appends events to the file, from any thread. Write errors are logged and not raised."""

    def __init__(self, workdir: Path, attempt: int, *, clock: Callable[[], float] = time.time):
        """
        Args:
            workdir: workdir of the run.
            attempt: number of this attempt of the run, from 1.
            clock: returns the time in seconds since 1970.
        """
        self._writer = JsonlWriter(workdir / EVENTS_FILE)
        self._attempt, self._clock = attempt, clock
        self._lock = threading.Lock()
        self._newest: dict[str, Any] | None = None

    def add(self, kind: str, message: str, *, step: int | None = None, **extra: Any) -> None:
        """Appends an event. `extra` is JSON. Events after the last event of an attempt are ignored."""
        event = {
            'time': round(self._clock(), 3),
            'life': self._attempt,
            'step': step,
            'kind': kind,
            'message': ' '.join(message.split()),
            **extra,
        }
        with self._lock:
            if self._newest and self._newest['kind'] in ENDS:
                return
            self._newest = event
            self._writer.write(event)

    @property
    def newest(self) -> dict[str, Any] | None:
        """Newest event of this attempt."""
        return self._newest


def read_events(workdir: Path) -> JsonlFile:
    """Reads the events of all attempts, oldest first.

    Raises:
        InputError: a line other than the last is not a JSON object.
    """
    return read_lines(workdir / EVENTS_FILE)
