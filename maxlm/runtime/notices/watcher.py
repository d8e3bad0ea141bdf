"""Stops the run after a preemption or maintenance notice of the cloud provider.

Only new events stop a run. A run that starts under a notice continues until a signal ends it. Otherwise it would be
stopped and restarted repeatedly until the machine ends.
"""

from __future__ import annotations

import http.client
import threading
import urllib.error
from collections.abc import Callable, Sequence

from maxlm.log import logger
from maxlm.runtime.notices import feed
from maxlm.runtime.notices.aws import aws_feeds
from maxlm.runtime.notices.azure import azure_feeds
from maxlm.runtime.notices.feed import Feed, Notice
from maxlm.runtime.notices.google import google_feeds

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
    ):
        """
        Args:
            stop: called from a background thread with the message of an event that must stop the run.
            warn: called with the message of each other event.
            feeds: sources of notices; None = result of `machine_feeds`.
        """
        self._stop, self._warn = stop, warn
        self._feeds = machine_feeds() if feeds is None else feeds
        self._closed = threading.Event()
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
        failures, pause = 0, feed.RETRY_SECONDS
        while not self._closed.is_set():
            try:
                notices = source.poll()
            except (OSError, http.client.HTTPException, ValueError) as error:
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
                if pending is None or (notice.id, notice.must_stop) not in pending:
                    self._report(notice, is_new=pending is not None)
            pending = {(notice.id, notice.must_stop) for notice in notices}
            self._closed.wait(source.delay)

    def _report(self, notice: Notice, *, is_new: bool) -> None:
        if not notice.must_stop:
            self._warn(notice.message)
        elif is_new:
            self._stop(notice.message)
        else:
            self._warn(f'{notice.message}: the notice predates this start; training continues until a signal arrives')

    def _log_failure(self, source: Feed, error: Exception) -> None:
        # All feeds query the same server, so one line is enough.
        if not self._logs_failure.acquire(blocking=False):
            return
        logger.warning(
            '%s: requests to the metadata server of the machine fail (%s); preemption notices cannot be read',
            source.name,
            error,
        )
