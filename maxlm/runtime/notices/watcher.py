"""Stops the run after a preemption or maintenance notice of the cloud provider.

Only new events stop a run. A run that starts under a notice continues until a signal ends it. Otherwise it would be
stopped and restarted repeatedly until the machine ends. For the same reason, a notice that returns soon after it has
stopped the run on this machine does not stop it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path

from maxlm.errors import one_line
from maxlm.log import logger
from maxlm.runtime.notices import feed
from maxlm.runtime.notices.aws import aws_feeds
from maxlm.runtime.notices.azure import azure_feeds
from maxlm.runtime.notices.feed import Feed, Notice, parse_object
from maxlm.runtime.notices.google import google_feeds
from maxlm.storage.regular_files import read_text

# Time after a stop in which the same notice does not stop the run again.
REPEAT_SECONDS = 600.0
# Maximum number of messages of a feed, and their maximum length. The server may be defective.
MAX_MESSAGES, MAX_CHARS = 20, 300
# Number of failed requests in a row after which the log contains a warning.
FAILURES_UNTIL_WARNING = 5


def machine_feeds() -> list[Feed]:
    """Returns the feeds of the cloud provider of this machine, or [] on other machines."""
    return [*google_feeds(), *aws_feeds(), *azure_feeds()]


class MaintenanceWatcher:
    """Context in which threads wait for notices. Does nothing on machines that belong to no cloud provider.

    A failing or silent server does not affect the run.
    """

    def __init__(
        self,
        stop: Callable[[str], None],
        *,
        warn: Callable[[str], None] = logger.warning,
        feeds: Sequence[Feed] | None = None,
        run: str = '',
    ):
        """
        Args:
            stop: called from a background thread with the message of an event that must stop the run.
            warn: called with the message of each other event.
            feeds: sources of notices; None = result of `machine_feeds`.
            run: identifies this process of the run on this machine, also after a restart.
        """
        self._stop, self._warn = stop, warn
        self._feeds = machine_feeds() if feeds is None else feeds
        self._closed = threading.Event()
        self._stops = _LastStop(run)
        # Acquired by the first feed that logs a failure, and never released.
        self._logs_failure = threading.Lock()

    def __enter__(self) -> MaintenanceWatcher:
        for source in self._feeds:
            # Daemon threads that are not joined, because each may wait for a long response.
            threading.Thread(target=self._watch, args=(source,), daemon=True, name=f'notices-{source.name}').start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _watch(self, source: Feed) -> None:
        pending: set[tuple[str, bool]] | None = None
        failures, pause, num_messages = 0, feed.RETRY_SECONDS, 0
        while not self._closed.is_set():
            try:
                notices = source.poll()
            except Exception as error:
                # Readers of nonsense may raise any error.
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                failures += 1
                if failures == FAILURES_UNTIL_WARNING:
                    self._log_failure(source, error)
                self._closed.wait(pause)
                pause = min(pause * 2, feed.MAX_RETRY_SECONDS)
                continue
            failures, pause = 0, feed.RETRY_SECONDS
            if self._closed.is_set():
                return
            for notice in notices:
                is_new = pending is None or (notice.id, notice.must_stop) not in pending
                if is_new and (notice.must_stop or num_messages < MAX_MESSAGES):
                    num_messages += 1
                    self._report(notice, is_first_poll=pending is None)
            pending = {(notice.id, notice.must_stop) for notice in notices}
            self._closed.wait(source.delay)

    def _report(self, notice: Notice, *, is_first_poll: bool) -> None:
        # The text comes from the network, and log lines are shown on terminals.
        message = one_line(notice.message[:MAX_CHARS])[:MAX_CHARS]
        if not notice.must_stop:
            self._warn(message)
        elif is_first_poll:
            self._warn(f'{message}: the notice predates this start; training continues until a signal arrives')
        elif self._stops.was_recent(message):
            self._warn(f'{message}: the notice has stopped this run before; training continues until a signal arrives')
        else:
            self._stops.record(message)
            self._stop(message)

    def _log_failure(self, source: Feed, error: Exception) -> None:
        # All feeds query the same server, so one line is enough.
        if not self._logs_failure.acquire(blocking=False):
            return
        logger.warning(
            '%s: requests to the metadata server of the machine fail (%s); preemption notices cannot be read',
            source.name,
            error,
        )


class _LastStop:
    """Last stop of a run by a notice, in a file of this machine, because the run restarts in another process."""

    def __init__(self, run: str):
        name = hashlib.sha256(run.encode(errors='surrogateescape')).hexdigest()[:16]
        self._path = Path(tempfile.gettempdir(), f'maxlm-notice-{os.getuid()}-{name}')

    def record(self, message: str) -> None:
        """Records a stop by this process. Without the file, a later notice stops the run again."""
        fields = {'boot': _boot_id(), 'time': time.monotonic(), 'process': os.getpid(), 'message': message}
        with contextlib.suppress(OSError):
            # Another user may have created the file, or a link with its name.
            self._path.unlink(missing_ok=True)
            with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'w', encoding='utf-8') as file:
                json.dump(fields, file)

    def was_recent(self, message: str) -> bool:
        """Returns True if this notice has stopped an earlier process of this run on this machine recently."""
        try:
            if self._path.stat().st_uid != os.getuid():
                return False
            fields = parse_object(read_text(self._path))
            # All processes of a machine share this clock, which does not jump.
            age = time.monotonic() - float(str(fields['time']))
        except (OSError, ValueError, KeyError):
            return False
        same = (fields.get('boot'), fields.get('message')) == (_boot_id(), message)
        return same and fields.get('process') != os.getpid() and 0 <= age < REPEAT_SECONDS


def _boot_id() -> str:
    try:
        return Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
    except OSError:
        return ''
