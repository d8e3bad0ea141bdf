"""Waits for files that another thread or process fetches: see `maxlm.data.dataset.shard_cache`.

Readers and fetcher communicate only through the cache directory. `.NAME.failed` contains the reason why a file cannot
be fetched. While a fetcher is running, `.fetching` is locked.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from maxlm.errors import InputError
from maxlm.storage.regular_files import open_descriptor, read_text

# Interval between checks for a missing file.
POLL_SECONDS = 0.1
LOCK_NAME = '.fetching'


def wait_for_file(path: Path) -> None:
    """Waits until `path` exists. Any process can wait for the files of a `Fetcher`.

    Raises:
        InputError: the file cannot be fetched, or no fetcher is running for its directory.
    """
    while not path.exists():
        try:
            raise InputError(read_text(error_marker(path)))
        except OSError:
            # There is no error marker, so the fetch has not failed.
            pass
        # The file may have arrived just before the fetcher stopped.
        if not is_locked(path.parent / LOCK_NAME) and not path.exists():
            raise InputError(f'{path} is missing, and no process is fetching it; run the same command again')
        time.sleep(POLL_SECONDS)


def is_locked(path: Path) -> bool:
    """Returns True if a process holds the lock of a file."""
    try:
        descriptor = open_descriptor(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def error_marker(path: Path) -> Path:
    """Returns the path of the file with the reason why `path` cannot be fetched."""
    return path.with_name(f'.{path.name}.failed')
