"""Atomic writes of files and directories."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from maxlm.errors import InputError, explain_os_errors, os_message
from maxlm.formatting import format_bytes


def atomic_write(path: Path, content: bytes | str, *, make_parents: bool = False) -> None:
    """Writes a small file, and creates its directory with `make_parents`. Raises InputError if it cannot be written."""
    with explain_os_errors(f'{path}: cannot be written', 'check permissions and disk space'):
        if make_parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def replace_file(path: Path, content: bytes | str, *, is_private: bool = False) -> None:
    """Replaces the content of a file. Readers see the old or the new content. Only the owner can read a private file.

    Raises:
        OSError: the file cannot be written. The old file remains.
    """
    with new_file(path) as partial:
        if is_private:
            partial.touch(0o600)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which is synced and renamed to `path` when the context ends.

    An error deletes the temporary file. A killed process leaves a hidden file whose name ends with `.partial`.

    Raises:
        OSError: the file cannot be written. An old file at `path` remains.
    """
    # Unique, because several processes may write the same file.
    partial = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.partial')
    try:
        yield partial
        with partial.open('rb') as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# Space for files other than tensors: tokenizer, model card and checkpoint metadata.
_MARGIN = 64 * 10**6


def check_new(option: str, path: str) -> Path:
    """Returns the absolute path of a new directory, and deletes what killed processes left of it.

    Raises:
        InputError: the path exists and is not an empty directory, or its nearest existing parent is not a directory.
    """
    directory = Path(path).expanduser().resolve()
    try:
        taken = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    except OSError as error:
        raise _unusable(option, path, error) from error
    if taken:
        raise InputError(
            f'{option}={path}: already exists and is not an empty directory; choose a new or empty directory'
        )
    if not _standing(directory).is_dir():
        raise InputError(f'{option}={path}: {_standing(directory)} is not a directory; choose another path')
    for partial in directory.parent.glob(f'.{glob.escape(directory.name)}.*.partial'):
        # Only its process holds the lock, which ends with it.
        with contextlib.suppress(OSError), _locked(partial):
            shutil.rmtree(partial)
    return directory


def check_space(option: str, directory: Path, needed: int) -> None:
    """Raises InputError unless `needed` bytes and a margin are free on the file system of `directory`."""
    free = shutil.disk_usage(_standing(directory)).free
    if needed + _MARGIN > free:
        raise InputError(
            f'{option}={directory}: needs {format_bytes(needed + _MARGIN)} of disk space, but only '
            f'{format_bytes(free)} are free; free up space or choose another disk'
        )


@contextlib.contextmanager
def new_directory(option: str, directory: Path) -> Iterator[Path]:
    """Yields a temporary directory next to `directory`, which is renamed when the context ends without an error.

    An error removes it. A killed process leaves a directory whose name ends with `.partial`, which `check_new` deletes.

    Raises:
        InputError: the directory cannot be written.
    """
    partial = directory.with_name(f'.{directory.name}.{os.getpid()}.partial')
    made = [parent for parent in directory.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            # Some shared disks do not lock directories. There, a later process cannot lock it either.
            with contextlib.suppress(OSError):
                stack.enter_context(_locked(partial))
            yield partial
            # Also replaces an empty directory.
            partial.replace(directory)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise _unusable(option, str(directory), error) from error
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Context that holds the lock of a directory. Raises OSError if another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _standing(directory: Path) -> Path:
    """Returns the nearest existing parent."""
    return next(parent for parent in directory.parents if parent.exists())


def _unusable(option: str, path: str, error: OSError) -> InputError:
    return InputError(f'{option}={path}: {os_message(error)}; choose a writable directory')
