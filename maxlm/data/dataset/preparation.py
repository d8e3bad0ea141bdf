"""Preparation of a data set during training: announces completed shards, and reads and checks the announcements.

`maxlm prepare --stream` adds its shards to the partial manifest in order. While it runs, LOCK_NAME is locked, and
PROGRESS_NAME contains the amount of processed input or the reason of a failure. Readers use nothing else, so they may
run in any process, and on any machine that shares the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType

from maxlm.data.dataset.manifest_files import MANIFEST_NAME
from maxlm.data.dataset.records import DatasetManifest, load_manifest, save_manifest
from maxlm.data.dataset.wait import is_locked
from maxlm.errors import InputError, explain_os_errors
from maxlm.storage.atomic import replace_file
from maxlm.storage.check_directory import check_entries
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_text

PARTIAL_MANIFEST = 'dataset.partial.json'
LOCK_NAME = '.preparing'
PROGRESS_NAME = '.preparing.json'
# Minimum number of seconds between two updates of the progress.
PROGRESS_SECONDS = 1.0
# Reason if a preparation has ended without announcing one.
STOPPED = 'has stopped'
# Identifies the content of the manifests of a directory.
ManifestVersion = tuple[tuple[int, int, int], ...]


class Announcer:
    """Announces a running preparation and its completed shards. A context manager around the preparation.

    An exception in the context is announced as the reason why the preparation failed.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._done = 0
        self._written = -PROGRESS_SECONDS

    def __enter__(self) -> Announcer:
        with explain_os_errors(self._directory, 'use a writable directory'):
            (self._directory / PROGRESS_NAME).unlink(missing_ok=True)
            self._lock = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        # Readers that test the lock hold it only for a moment.
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            reason = f'failed: {error}' if isinstance(error, Exception) else 'was interrupted'
            with contextlib.suppress(OSError):
                self._write({'failure': ' '.join(reason.split())})
        os.close(self._lock)

    def progress(self, num_bytes: int) -> None:
        """Adds newly processed bytes of the input."""
        self._done += num_bytes
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            self._written = time.monotonic()
            self._write({'bytes': self._done})

    def publish(self, dataset: DatasetManifest) -> None:
        """Replaces the partial manifest. The shards of the previous one must be the first shards of `dataset`."""
        save_manifest(dataset, PARTIAL_MANIFEST)

    def _write(self, progress: dict[str, object]) -> None:
        replace_file(self._directory / PROGRESS_NAME, json.dumps(progress))


def remove_announcements(directory: Path) -> None:
    """Removes the files of an `Announcer` from a completed data set."""
    for name in (PARTIAL_MANIFEST, PROGRESS_NAME, LOCK_NAME):
        (directory / name).unlink(missing_ok=True)


def is_preparing(directory: Path) -> bool:
    """Returns True if a preparation that announces its shards is running."""
    return is_locked(directory / LOCK_NAME)


def read_progress(directory: Path) -> str:
    """Returns a text that changes when the preparation makes progress."""
    try:
        check_entries(directory, [PROGRESS_NAME])
        return read_text(directory / PROGRESS_NAME)
    except (InputError, OSError, UnicodeDecodeError):
        return ''


def stop_reason(directory: Path) -> str:
    """Returns why a preparation that is not running has ended, as the predicate of a sentence."""
    try:
        return str(parse_json(read_progress(directory).encode())['failure'])
    except (ValueError, KeyError, TypeError):
        return STOPPED


def manifest_version(directory: Path) -> ManifestVersion:
    """Returns a value that changes when a manifest of the directory changes."""
    versions = []
    for name in (MANIFEST_NAME, PARTIAL_MANIFEST):
        with contextlib.suppress(OSError):
            status = (directory / name).stat()
            versions.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(versions)


def load_current(directory: Path) -> tuple[DatasetManifest, bool]:
    """Returns the data set as far as it is prepared, and True if it is complete.

    Raises:
        InputError: no shard is prepared, or a manifest or file is damaged.
    """
    if not (directory / MANIFEST_NAME).exists() and (directory / PARTIAL_MANIFEST).exists():
        try:
            return load_manifest(directory, name=PARTIAL_MANIFEST), False
        except InputError:
            # Completion removes the partial manifest.
            if not (directory / MANIFEST_NAME).exists():
                raise
    return load_manifest(directory), True
