"""Checks files of a directory that other people made, before they are read."""

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
    """Checks files of a directory that a reader is about to open. A name without an entry passes.

    Args:
        directory: where the files are.
        names: names of the files.
        root: the directory that links must not leave; '' = `directory`.
        limit: largest size in bytes; None = any.

    Raises:
        InputError: an entry is a special file or a directory, is a link that leads nowhere or out of `root`, cannot be
            read, or is too large.
    """
    allowed = _allowed(os.path.realpath(root or directory))
    for name in names:
        path = os.path.join(directory, name)
        try:
            if os.path.lexists(path):
                _check_entry(path, allowed, limit)
        except OSError as error:
            raise InputError(f'{path}: {os_message(error)}') from error


def _check_entry(path: str, allowed: tuple[str, ...], limit: int | None) -> None:
    target = os.path.realpath(path)
    if os.path.islink(path) and not os.path.isfile(path):
        # Devices and FIFOs too: opening one can block.
        raise NotRegularError(errno.EINVAL, f'is a link to {target}, which is not a file', path)
    check_regular(path)
    if os.path.islink(path) and not target.startswith(allowed):
        raise NotRegularError(
            errno.EINVAL, f'is a link to {target}, outside of its directory; replace it by a copy of the file', path
        )
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if limit is not None:
        check_size(path, os.stat(path).st_size, limit)


def _allowed(root: str) -> tuple[str, ...]:
    """Returns the prefixes of the paths that links may lead to.

    The cache of huggingface_hub keeps `models--NAME/snapshots/COMMIT` as links to files of `models--NAME/blobs`.
    """
    repository, snapshots, _ = root.rpartition(f'{os.sep}snapshots{os.sep}')
    is_cached = snapshots and os.path.basename(repository).startswith('models--')
    blobs = (os.path.join(repository, 'blobs', ''),) if is_cached else ()
    return (os.path.join(root, ''), *blobs)
