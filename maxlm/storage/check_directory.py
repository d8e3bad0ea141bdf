"""Checks files of untrusted directories before they are read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable

from maxlm.errors import InputError, explain_os_errors, os_message
from maxlm.storage.regular_files import MAX_TEXT_BYTES, NotRegularError, check_regular, check_size

# Maximum number of characters of a path in a message.
MAX_SHOWN = 500


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
            # Not os.path.lexists, which ignores errors such as a name that is too long.
            os.lstat(path)
            _check_entry(path, allowed, limit)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = os_message(error) if isinstance(error, OSError) else str(error)
            shown = path if len(path) <= MAX_SHOWN else f'{path[:MAX_SHOWN]}…'
            raise InputError(f'{shown}: {reason}; replace it with a readable regular file') from error


def find_entries(directory: str | os.PathLike[str], names: Iterable[str]) -> dict[str, int]:
    """Checks files of a directory like `check_entries`, with one listing for any number of files.

    Returns:
        The sizes in bytes of the files that exist, by name.

    Raises:
        InputError: the directory cannot be listed, or a file is not a valid entry.
    """
    expected, sizes, others = set(names), {}, []
    with explain_os_errors(directory, 'choose a readable directory'), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in expected:
                status = entry.stat(follow_symlinks=False)
                sizes[entry.name] = status.st_size
                if not stat.S_ISREG(status.st_mode):
                    others.append(entry.name)
    check_entries(directory, others, limit=None)
    return sizes | {name: os.stat(os.path.join(directory, name)).st_size for name in others}


def check_links(directory: str | os.PathLike[str]) -> None:
    """Raises InputError if a link below a directory leads outside it. Does not follow links to directories."""
    for folder, folders, files in os.walk(directory):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(path) and not is_inside(path, directory):
                raise InputError(
                    f'{path}: is a link to {os.path.realpath(path)}, outside its directory; replace it with the file'
                )


def is_inside(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> bool:
    """Returns True if a path stays below the directory `root` after all links below `root` are resolved."""
    return os.path.realpath(path).startswith(_allowed(os.path.realpath(root)))


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

    The cache of huggingface_hub stores `models--NAME/snapshots/COMMIT` as links to files of `models--NAME/blobs`, and
    data sets in `datasets--NAME`.
    """
    repository, snapshots, _ = root.rpartition(f'{os.sep}snapshots{os.sep}')
    is_cached = snapshots and os.path.basename(repository).startswith(('models--', 'datasets--'))
    blobs = (os.path.join(repository, 'blobs', ''),) if is_cached else ()
    return (os.path.join(root, ''), *blobs)
