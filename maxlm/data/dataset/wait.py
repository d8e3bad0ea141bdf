"""Waiting for files that another thread or process fetches: see `maxlm.data.dataset.shard_cache`.

Readers and fetcher talk through the cache directory alone: `.NAME.failed` says why a file will not come, and while
`.fetching` is locked there is somebody to wait for.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from maxlm.errors import InputError

# Between two looks at a file that is not there yet.
POLL_SECONDS = 0.1
LOCK_NAME = '.fetching'


def wait_for_file(path: Path, *, sleep: Callable[[float], object] = time.sleep) -> None:
    """Returns when `path` is there, at once if it is; any process may wait for what a `Fetcher` fetches.

    Raises:
        InputError: it cannot be fetched, or nobody is fetching files of its directory.
    """
    while not path.exists():
        try:
            raise InputError(error_marker(path).read_text(encoding='utf-8'))
        except OSError:
            # No such file: it has not failed.
            pass
        # It may have come just before the fetcher ended.
        if not _is_fetched(path.parent) and not path.exists():
            raise InputError(f'{path} is missing, and nothing is fetching it')
        sleep(POLL_SECONDS)


def _is_fetched(directory: Path) -> bool:
    """Whether a fetcher is at work on files of a directory: then its lock cannot be had."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR)
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
    """Where the reason lies why a file will not come."""
    return path.with_name(f'.{path.name}.failed')
