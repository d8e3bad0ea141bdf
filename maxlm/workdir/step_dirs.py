"""Step directories of a run, on a disk or in a bucket. Steps become visible and are deleted atomically.

WORKDIR/checkpoints/<step>/            complete step on a disk, renamed when all files were written
gs://… or s3://…/checkpoints/<step>/…  complete if its `commit_success.txt` exists, which is written last
WORKDIR/checkpoints/_trash/<step>      step that is being deleted, on a disk only
WORKDIR/checkpoints/_damaged/<step>    step set aside on a disk; a bucket has no rename, so `damaged.txt` marks it
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from maxlm.errors import InputError, os_message
from maxlm.storage.errors import classify_error
from maxlm.storage.filesystem import is_url
from maxlm.workdir import s3_checkpoints

# URLs into which Orbax writes checkpoints.
BUCKETS = ('gs://', s3_checkpoints.PREFIX)
CHECKPOINTS_DIR = 'checkpoints'
TRASH = '_trash'
DAMAGED = '_damaged'
# Commit marker of steps in a bucket, where directories cannot be renamed.
COMMIT_MARKER = 'commit_success.txt'
# Marker of a corrupt step in a bucket. The step is kept, although incomplete, until its number is saved again.
DAMAGED_MARKER = 'damaged.txt'
# `WORKDIR@best`: the step with the lowest validation loss.
BEST = 'best'
# Part of the names of unfinished directories on a disk.
UNFINISHED = '.orbax-checkpoint-tmp'

_PROBE = '_probe'
_PROBE_BYTES = 2**16


def in_bucket(path: Any) -> bool:
    """Returns True for the URL of a bucket that `to_path` accepts."""
    return str(path).startswith(BUCKETS)


def to_path(path: Any) -> epath.Path:
    """Returns a directory, gs:// or s3:// URL as a path for Orbax and this package. Local paths become absolute.

    Raises:
        InputError: the installed Orbax does not support s3://.
    """
    if not in_bucket(path):
        return epath.Path(os.path.abspath(path))
    if str(path).startswith(s3_checkpoints.PREFIX):
        s3_checkpoints.enable()
    # Otherwise epath would use TensorFlow's client if TensorFlow is installed.
    os.environ.setdefault('EPATH_USE_TF', 'false')
    import fsspec.config  # slow to import

    for protocol in ('gs', 'gcs', 's3'):
        # Cached listings hide files that other processes write.
        fsspec.config.conf.setdefault(protocol, {}).setdefault('use_listings_cache', False)
    return epath.Path(path)


def split_name(checkpoint: str) -> tuple[str, str]:
    """Splits `WORKDIR@STEP` or `WORKDIR@best`, local or a URL, into the workdir and the text after the @, or ''.

    If a local path does not exist, any text after its @ is a step. In a URL, only a number or `best` is.
    """
    workdir, _, step = checkpoint.rpartition('@')
    can_be = step.isdigit() or step == BEST if is_url(checkpoint) else not Path(checkpoint).exists()
    return (workdir.rstrip('/'), step) if workdir and can_be else (checkpoint.rstrip('/'), '')


def with_step(checkpoint: str, step: int) -> str:
    """Returns a reference to the step that was loaded for a checkpoint, so that later uses read the same step."""
    workdir, _ = split_name(checkpoint)
    path = Path(workdir)
    if path.name == str(step) and path.parent.name == CHECKPOINTS_DIR:
        return checkpoint
    return f'{workdir}@{step}'


class StepDirectory:
    """Directory WORKDIR/checkpoints. Only one process may change it."""

    def __init__(self, workdir: Any):
        self.path = to_path(workdir) / CHECKPOINTS_DIR
        self._in_bucket = in_bucket(self.path)

    @property
    def in_bucket(self) -> bool:
        """True if the directory is in a bucket."""
        return self._in_bucket

    def is_complete(self, step: int | str) -> bool:
        """Returns True if a step is complete, according to its name and marker."""
        path = self.path / str(step)
        return bool((path / COMMIT_MARKER).exists() if self._in_bucket else path.is_dir())

    def complete(self) -> list[int]:
        """Returns the complete steps, oldest first. A missing directory has no steps.

        Raises:
            InputError: the directory cannot be listed.
        """
        with self._translate_errors():
            return sorted(int(name) for name in self._names() if name.isdigit() and self.is_complete(name))

    def delete(self, step: int) -> None:
        """Deletes a step, if it exists. Readers never see a part of it, even after a kill.

        Raises:
            InputError: the step cannot be deleted.
        """
        path = self.path / str(step)
        with self._translate_errors():
            if self._in_bucket:
                (path / COMMIT_MARKER).unlink(missing_ok=True)
                _remove(path)
            else:
                self._discard(path, str(step))

    def delete_item(self, step: int, item: str) -> None:
        """Deletes an item of a step on a disk, if it exists. A rename hides it before its files are deleted.

        Raises:
            InputError: the item cannot be deleted.
        """
        assert not self._in_bucket
        with self._translate_errors():
            self._discard(self.path / str(step) / item, f'{step}-{item}')

    def set_aside(self, step: int) -> epath.Path:
        """Hides a corrupt step without deleting it. Returns its path.

        Raises:
            InputError: the step cannot be set aside.
        """
        path = self.path / str(step)
        with self._translate_errors():
            if self._in_bucket:
                (path / DAMAGED_MARKER).write_text(
                    'moved to the damaged steps; deleted when a step of this number is saved again'
                )
                (path / COMMIT_MARKER).unlink(missing_ok=True)
                return path
            folder = self.path / DAMAGED
            names = (str(step), *(f'{step}-{number}' for number in range(2, 1000)))
            target = next(folder / name for name in names if not (folder / name).exists())
            folder.mkdir(parents=True, exist_ok=True)
            path.rename(target)
            return target

    def clear(self) -> None:
        """Deletes the remains of interrupted or failed saves and deletions.

        Raises:
            InputError: a file cannot be deleted.
        """
        with self._translate_errors():
            for name in self._names():
                path = self.path / name
                if name == TRASH:
                    # The trash directory itself stays.
                    for step in path.iterdir():
                        _remove(step)
                elif UNFINISHED in name or (self._in_bucket and name.isdigit() and self._is_leftover(path)):
                    _remove(path)

    def probe_write(self) -> None:
        """Raises an OSError, or an error of the bucket client, if the directory cannot be written."""
        probe = self.path / _PROBE
        try:
            probe.mkdir(parents=True, exist_ok=True)
            (probe / 'file').write_bytes(bytes(_PROBE_BYTES))
        finally:
            with contextlib.suppress(Exception):
                _remove(probe)

    def _discard(self, path: epath.Path, name: str) -> None:
        trash = self.path / TRASH / name
        trash.parent.mkdir(parents=True, exist_ok=True)
        _remove(trash)
        # Rename first, because a kill during a deletion in place would leave a part of the directory visible.
        with contextlib.suppress(FileNotFoundError):
            path.rename(trash)
        _remove(trash)

    def _is_leftover(self, path: epath.Path) -> bool:
        return not (path / COMMIT_MARKER).exists() and not (path / DAMAGED_MARKER).exists()

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Bucket clients pass on exceptions of their dependencies, which have no common base class.
            if self._in_bucket:
                raise classify_error(str(self.path), error) from error
            if isinstance(error, OSError):
                raise InputError(
                    f'{error.filename or self.path}: {os_message(error)}; check permissions and disk space'
                ) from error
            raise


def _remove(path: epath.Path) -> None:
    # Twice, because the first call may stop early in a bucket when the directory's own object is deleted.
    path.rmtree(missing_ok=True)
    path.rmtree(missing_ok=True)
