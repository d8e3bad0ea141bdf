"""Checks files of untrusted directories before they are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from maxlm.errors import InputError, os_message
from maxlm.storage.regular_files import MAX_TEXT_BYTES, NotRegularError, check_regular, check_size


def check_entries(
    directory: str | os.PathLike[str],
    names: Iterable[str],
    *,
    root: str | os.PathLike[str] = '',
    limit: int | None = MAX_TEXT_BYTES,
) -> None:
    """Checks files of a directory before a reader opens them. Ignores names without a file.

    Args:
        directory: directory of the files.
        names: names of the files.
        root: directory that links must not leave; '' = `directory`.
        limit: maximum size in bytes; None = unlimited.

    Raises:
        InputError: a file is a special file or a directory, links outside `root` or nowhere, cannot be read, or is
            too large.
    """
    allowed = _allowed(os.path.realpath(root or directory))
    for name in names:
        path = os.path.join(directory, name)
        try:
            if os.path.lexists(path):
                _check_entry(path, allowed, limit)
        except OSError as error:
            raise InputError(f'{path}: {os_message(error)}; replace it with a readable regular file') from error


def _check_entry(path: str, allowed: tuple[str, ...], limit: int | None) -> None:
    target = os.path.realpath(path)
    if os.path.islink(path) and not os.path.isfile(path):
        # The link may lead to a device or a FIFO, and opening one can block.
        raise NotRegularError(errno.EINVAL, f'is a link to {target}, which is not a file', path)
    check_regular(path)
    if os.path.islink(path) and not target.startswith(allowed):
        raise NotRegularError(errno.EINVAL, f'is a link to {target}, outside its directory', path)
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if limit is not None:
        check_size(path, os.stat(path).st_size, limit)


def _allowed(root: str) -> tuple[str, ...]:
    """Returns the path prefixes of valid link targets.

    The cache of huggingface_hub stores `models--NAME/snapshots/COMMIT` as links to files of `models--NAME/blobs`.
    """
    repository, snapshots, _ = root.rpartition(f'{os.sep}snapshots{os.sep}')
    is_cached = snapshots and os.path.basename(repository).startswith('models--')
    blobs = (os.path.join(repository, 'blobs', ''),) if is_cached else ()
    return (os.path.join(root, ''), *blobs)
