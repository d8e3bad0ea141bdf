"""Reads local regular files and refuses all others: opening a FIFO, a socket or a device can block forever."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: 'a FIFO',
    stat.S_IFSOCK: 'a socket',
    stat.S_IFCHR: 'a character device',
    stat.S_IFBLK: 'a block device',
    stat.S_IFDIR: 'a directory',
}


class NotRegularError(OSError):
    """The path names a file that is not a regular one; `strerror` says of which kind it is."""


def kind_of(mode: int) -> str:
    """Returns the kind of a file in words, from `st_mode`; '' for a regular file."""
    return '' if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), 'a special file')


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises NotRegularError unless a path names a regular file; FileNotFoundError if it names nothing."""
    _check(path, os.stat(path).st_mode)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to read; never blocks. Raises OSError."""
    return os.fdopen(open_descriptor(path), 'rb')


def open_descriptor(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Returns a descriptor of a regular file; suits the argument `opener` of `open`. Raises OSError."""
    try:
        # Before it is opened: opening a device can have effects.
        check_regular(path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # Without O_NONBLOCK, a FIFO that takes the place of the file in between would block.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    try:
        _check(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a regular file. Raises OSError."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the UTF-8 text of a regular file, with newlines as `Path.read_text` has them. Raises OSError."""
    with open(path, encoding='utf-8', opener=open_descriptor) as file:
        return file.read()


def _check(path: str | os.PathLike[str], mode: int) -> None:
    if kind := kind_of(mode):
        raise NotRegularError(errno.EINVAL, f'is {kind}, not a regular file', str(path))
