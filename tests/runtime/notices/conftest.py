"""Shortens the delays of notices, separates them from other processes, and records the reactions to them."""

import queue
import tempfile

import pytest

from maxlm.runtime.notices import aws, azure, feed
from maxlm.runtime.notices.watcher import MaintenanceWatcher


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(feed, 'RETRY_SECONDS', 0.01)
    monkeypatch.setattr(feed, 'MAX_RETRY_SECONDS', 0.02)
    monkeypatch.setattr(aws, 'POLL_SECONDS', 0.01)
    monkeypatch.setattr(azure, 'POLL_SECONDS', 0.01)


@pytest.fixture(autouse=True)
def own_last_stop(monkeypatch, tmp_path):
    """Keeps the last stop of another process of this machine from the tests."""
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))


@pytest.fixture
def dmi(tmp_path, monkeypatch):
    """Returns an empty directory that takes the place of the machine's identification."""
    directory = tmp_path / 'dmi'
    directory.mkdir()
    monkeypatch.setattr(feed, 'DMI', directory)
    return directory


class WatcherCalls:
    """Records the calls of a `MaintenanceWatcher`, in order."""

    def __init__(self, feeds):
        self._queue = queue.Queue()
        self.watcher = MaintenanceWatcher(
            lambda text: self._queue.put(('stop', text)),
            warn=lambda text: self._queue.put(('warn', text)),
            feeds=feeds,
        )

    def next(self):
        return self._queue.get(timeout=30)

    def is_empty(self):
        return self._queue.empty()


@pytest.fixture
def watch():
    """Starts a watcher of the given feeds, and returns its calls."""
    started = []

    def start(feeds):
        calls = WatcherCalls(feeds)
        started.append(calls.watcher)
        calls.watcher.__enter__()
        return calls

    yield start
    for watcher in started:
        watcher.__exit__()
