"""Scratch directories of processes. Those of killed processes are removed by later ones on the same machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from maxlm.errors import InputError, os_message

PREFIX = 'maxlm-prepare'


@contextlib.contextmanager
def scratch_directory(parent: str | Path | None = None) -> Iterator[Path]:
    """Yields an empty directory, which is removed at the end of the context.

    Args:
        parent: directory in which it is created; None = the directory of temporary files (TMPDIR).

    Raises:
        InputError: the directory cannot be created.
    """
    # The name contains the machine, because its locks are unknown to other machines that share the disk.
    prefix = f'{PREFIX}-{socket.gethostname()}-'
    try:
        folder = Path(parent or tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder, prefix)
        unlocked = Path(tempfile.mkdtemp(prefix='.', dir=folder))
        descriptor = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Other processes only remove directories with the prefix.
        directory = unlocked.rename(folder / f'{prefix}{unlocked.name[1:]}')
    except OSError as error:
        raise InputError(f'{error.filename}: {os_message(error)}; set TMPDIR or --cache to a writable disk') from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Removes directories whose process was killed, which released its lock."""
    for path in folder.glob(f'{prefix}*'):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)
