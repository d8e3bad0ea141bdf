"""Reads local regular files and rejects special files. Opening a FIFO, a socket or a device can block forever."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader

_KINDS = {
    stat.S_IFIFO: 'a FIFO',
    stat.S_IFSOCK: 'a socket',
    stat.S_IFCHR: 'a character device',
    stat.S_IFBLK: 'a block device',
    stat.S_IFDIR: 'a directory',
}


# Text and JSON files are read completely into memory. The largest tokenizers have 40 MiB. A sparse file can exceed any
# memory.
MAX_TEXT_BYTES = 2**27


class NotRegularError(OSError):
    """The path is not a regular file, or the file is too large. `strerror` states the reason."""


def kind_of(mode: int) -> str:
    """Returns the kind of a special file in words, from `st_mode`, or '' for a regular file."""
    return '' if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), 'a special file')


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises NotRegularError unless a path is a regular file, and FileNotFoundError if it does not exist."""
    _check(path, os.stat(path).st_mode)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file for reading. Never blocks. Raises OSError."""
    return os.fdopen(open_descriptor(path), 'rb')


def open_descriptor(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens a regular file and returns its descriptor. Can be the argument `opener` of `open`. Raises OSError."""
    try:
        # Check the type before opening, because opening a device can have side effects.
        check_regular(path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # Without O_NONBLOCK, the call would block if a FIFO replaced the file after the check.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    try:
        _check(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: str | os.PathLike[str], *, limit: int | None = None) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes. Raises OSError."""
    with open_regular(path) as file:
        if limit is not None:
            check_size(path, os.fstat(file.fileno()).st_size, limit)
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the UTF-8 text of a regular file of at most `MAX_TEXT_BYTES`. Raises OSError.

    Translates newlines like `Path.read_text`.
    """
    with open(path, encoding='utf-8', opener=open_descriptor) as file:
        check_size(path, os.fstat(file.fileno()).st_size, MAX_TEXT_BYTES)
        return file.read()


def check_size(path: str | os.PathLike[str], size: int, limit: float) -> None:
    """Raises NotRegularError if the size of a file exceeds `limit`."""
    if size > limit:
        raise NotRegularError(errno.EFBIG, f'has {size:,} bytes, more than the limit of {limit:,}', str(path))


def _check(path: str | os.PathLike[str], mode: int) -> None:
    if kind := kind_of(mode):
        raise NotRegularError(errno.EINVAL, f'is {kind}, not a regular file', str(path))
