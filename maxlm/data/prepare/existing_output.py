"""Checks data sets that already exist, in a directory or a bucket. Locks output directories and removes leftovers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlm.data.chat.template import CHAT_TEMPLATE_FILE
from maxlm.data.dataset.preparation import remove_announcements
from maxlm.data.dataset.records import STREAM, DatasetManifest, load_manifest
from maxlm.data.dataset.shard_cache import fetch_manifest
from maxlm.data.parts.part_store import WORK_DIRECTORY
from maxlm.data.prepare.options import CHAT_FIELDS, READING_FIELDS
from maxlm.data.prepare.pipeline import CLEANING_FILE, PARTITIONS_SKIPPED
from maxlm.data.prepare.summary import summary
from maxlm.data.prepare.write_shards import find_leftover_files
from maxlm.data.tokenizer.text_boundaries import TEXT_BOUNDARIES_FILE
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


def _lock(directory: int, kind: int) -> None:
    """Locks an open directory. `kind` is LOCK_EX or LOCK_SH.

    Raises:
        BlockingIOError: another process has held the lock for `LOCK_SECONDS`.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(directory, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def locked(output: Path, *, is_share: bool = False) -> Iterator[None]:
    """Creates the output directory and locks it against other runs; with `is_share`, not against other shares.

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
            _lock(directory, fcntl.LOCK_SH if is_share else fcntl.LOCK_EX)
        except BlockingIOError as error:
            raise InputError(
                f'--output={output}: another maxlm prepare is writing to it; wait for it, or choose another directory'
            ) from error
        yield
    finally:
        os.close(directory)


def remove_leftovers(dataset: DatasetManifest, *, cleaned: bool) -> None:
    """Removes temporary files and files of earlier runs that do not belong to the completed data set."""
    shutil.rmtree(dataset.path / WORK_DIRECTORY, ignore_errors=True)
    remove_announcements(dataset.path)
    remove_partial_files(dataset.path)
    for path in find_leftover_files(
        dataset.path, [shard for split in dataset.splits.values() for shard in split.shards]
    ):
        path.unlink()
    if not dataset.chat_template_sha256:
        (dataset.path / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    if not dataset.text_boundaries_sha256:
        (dataset.path / TEXT_BOUNDARIES_FILE).unlink(missing_ok=True)
    if not cleaned:
        (dataset.path / CLEANING_FILE).unlink(missing_ok=True)


def remove_partial_files(output: Path) -> None:
    """Removes partial files of killed processes. Requires that no task is running."""
    for directory in (output, output / WORK_DIRECTORY):
        for path in directory.glob('.*.partial'):
            path.unlink(missing_ok=True)
