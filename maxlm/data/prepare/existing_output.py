"""Checks data sets that already exist, in a local directory or a bucket, and locks output directories."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlm.data.dataset.records import STREAM, DatasetManifest, load_manifest
from maxlm.data.dataset.shard_cache import fetch_manifest
from maxlm.data.prepare.options import CHAT_FIELDS, READING_FIELDS
from maxlm.data.prepare.pipeline import PARTITIONS_SKIPPED
from maxlm.data.prepare.summary import summary
from maxlm.errors import InputError, os_message
from maxlm.storage.filesystem import display_path

# Time to wait for the lock of an output directory, because the workers of a killed run hold it until they exit.
LOCK_SECONDS = 5.0


class OtherDataError(InputError):
    """The existing data set was made from other inputs or options."""


def check_same_data(dataset: DatasetManifest, name: str, made_from: dict[str, Any], *, skip_failed: bool) -> None:
    """Raises OtherDataError unless a data set was made from the requested inputs and options.

    Args:
        dataset: the existing data set.
        name: its name in messages.
        made_from: the requested inputs and options.
        skip_failed: whether the data set may lack partitions that failed.
    """
    changes = [
        f'{key} {dataset.made_from.get(key)}, not {value}' if key != 'inputs' else 'other input files'
        for key, value in {**dict.fromkeys((*CHAT_FIELDS, *READING_FIELDS, STREAM)), **made_from}.items()
        if dataset.made_from.get(key) != value
    ]
    if changes:
        raise OtherDataError(f'{name} contains a data set made from {"; ".join(changes)}; choose another --output')
    lost = dataset.made_from.get(PARTITIONS_SKIPPED)
    if lost and not skip_failed:
        raise OtherDataError(
            f'{name} was made with --skip-failed and lacks {lost} partitions that failed; '
            'choose another --output to retry them'
        )


def published(url: str, made_from: dict[str, Any], *, skip_failed: bool) -> tuple[list[str], DatasetManifest]:
    """Returns the summary and the manifest of a data set in a bucket.

    Raises:
        OtherDataError: it was made from other inputs or options.
        InputError: it cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        fetch_manifest(url, Path(folder), on_warning=lambda line: print(f'prepare: {line}', file=sys.stderr))
        dataset = load_manifest(folder, complete=False)
        check_same_data(dataset, display_path(url), made_from, skip_failed=skip_failed)
        lines = summary(dataset, f'{display_path(url)} is already prepared from these inputs', cleaned=False)
    return [line.replace(folder, display_path(url)) for line in lines], dataset


def _lock(directory: int) -> None:
    """Locks an open directory.

    Raises:
        BlockingIOError: another process has held the lock for `LOCK_SECONDS`.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Creates the output directory and locks it against other runs.

    Raises:
        InputError: the directory cannot be written, or another run has locked it.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK | os.X_OK):
            raise PermissionError(0, 'no permission to write')
        directory = os.open(output, os.O_RDONLY)
    except OSError as error:
        raise InputError(f'--output={output}: {os_message(error)}; use a writable directory') from error
    try:
        try:
            _lock(directory)
        except BlockingIOError as error:
            raise InputError(
                f'--output={output}: another maxlm prepare is writing to it; wait for it, or choose another directory'
            ) from error
        yield
    finally:
        os.close(directory)
