"""The folder of a run's steps, on a disk or in a bucket: which are complete, and how one goes, never half visible.

WORKDIR/checkpoints/<step>/            complete, on a disk: it got this name when all of it was written
gs://…/checkpoints/<step>/…            complete when its `commit_success.txt` is there, which is written last
WORKDIR/checkpoints/_trash/<step>      about to be deleted; on a disk only
WORKDIR/checkpoints/_damaged/<step>    set aside; in a bucket, where moving is copying, `damaged.txt` marks it
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

CHECKPOINTS_DIR = 'checkpoints'
TRASH = '_trash'
DAMAGED = '_damaged'
# In a bucket, where nothing can be renamed, a step is complete when this is there.
COMMIT_MARKER = 'commit_success.txt'
# In a bucket, a step with this stays, although it is not complete any more, until one of its number is saved.
DAMAGED_MARKER = 'damaged.txt'
# `WORKDIR@best`: the step with the lowest validation loss.
BEST = 'best'
# In the name of what is being written on a disk.
UNFINISHED = '.orbax-checkpoint-tmp'

_PROBE = '_probe'
_PROBE_BYTES = 2**16


def to_path(path: Any) -> epath.Path:
    """A directory or gs://… as a path that both Orbax and this package can use; a directory's is absolute."""
    if not str(path).startswith('gs://'):
        return epath.Path(os.path.abspath(path))
    # TensorFlow's own client would be taken if TensorFlow is installed.
    os.environ.setdefault('EPATH_USE_TF', 'false')
    import fsspec.config  # takes a while

    for protocol in ('gs', 'gcs'):
        # Listings that are kept hide what other processes wrote.
        fsspec.config.conf.setdefault(protocol, {}).setdefault('use_listings_cache', False)
    return epath.Path(path)


def split_name(checkpoint: str) -> tuple[str, str]:
    """`WORKDIR@STEP` or `WORKDIR@best`, local or a URL: the workdir and what stands behind the @, '' for nothing.

    Of a directory that is not there as it stands anything behind the @ is a step, of a URL what can be one.
    """
    workdir, _, wanted = checkpoint.rpartition('@')
    can_be = wanted.isdigit() or wanted == BEST if is_url(checkpoint) else not Path(checkpoint).exists()
    return (workdir.rstrip('/'), wanted) if workdir and can_be else (checkpoint.rstrip('/'), '')


class StepDirectory:
    """WORKDIR/checkpoints. Whoever changes it is one process."""

    def __init__(self, workdir: Any):
        self.path = to_path(workdir) / CHECKPOINTS_DIR
        self._in_bucket = str(self.path).startswith('gs://')

    @property
    def in_bucket(self) -> bool:
        """Whether it is in a bucket, and not on a disk."""
        return self._in_bucket

    def is_complete(self, step: int | str) -> bool:
        """Whether this step can be restored, as far as its name and marker tell."""
        path = self.path / str(step)
        return bool((path / COMMIT_MARKER).exists() if self._in_bucket else path.is_dir())

    def complete(self) -> list[int]:
        """The complete steps, oldest first; none where there is no folder.

        Raises:
            InputError: it cannot be listed.
        """
        with self._translate_errors():
            return sorted(int(name) for name in self._names() if name.isdigit() and self.is_complete(name))

    def delete(self, step: int) -> None:
        """Deletes a step, if it is there: all at once for whoever looks, also if a kill comes in between.

        Raises:
            InputError: it cannot be deleted.
        """
        path = self.path / str(step)
        with self._translate_errors():
            if self._in_bucket:
                (path / COMMIT_MARKER).unlink(missing_ok=True)
                _remove(path)
                return
            trash = self.path / TRASH / str(step)
            trash.parent.mkdir(parents=True, exist_ok=True)
            _remove(trash)
            # Deleted in place, a kill would leave a visible half of it.
            with contextlib.suppress(FileNotFoundError):
                path.rename(trash)
            _remove(trash)

    def set_aside(self, step: int) -> epath.Path:
        """Takes a damaged step out of sight, without deleting it; returns where it is.

        Raises:
            InputError: that cannot be done.
        """
        path = self.path / str(step)
        with self._translate_errors():
            if self._in_bucket:
                (path / DAMAGED_MARKER).write_text(
                    'set aside as damaged; gone when a step of this number is saved again'
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
        """Deletes what saves and deletions that were killed or have failed left behind.

        Raises:
            InputError: it cannot be deleted.
        """
        with self._translate_errors():
            for name in self._names():
                path = self.path / name
                if name == TRASH:
                    # The folder itself stays.
                    for step in path.iterdir():
                        _remove(step)
                elif UNFINISHED in name or (self._in_bucket and name.isdigit() and self._is_leftover(path)):
                    _remove(path)

    def probe_write(self) -> None:
        """Raises an OSError, or what a bucket's client raises, where nothing can be written."""
        probe = self.path / _PROBE
        try:
            probe.mkdir(parents=True, exist_ok=True)
            (probe / 'file').write_bytes(bytes(_PROBE_BYTES))
        finally:
            with contextlib.suppress(Exception):
                _remove(probe)

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
            # Clients of buckets raise what their own libraries raise: there is no common ancestor.
            if self._in_bucket:
                raise classify_error(str(self.path), error) from error
            if isinstance(error, OSError):
                raise InputError(f'{error.filename or self.path}: {os_message(error)}') from error
            raise


def _remove(path: epath.Path) -> None:
    # Twice: in a bucket the first time may be over when the object that stands for the directory is gone.
    path.rmtree(missing_ok=True)
    path.rmtree(missing_ok=True)
