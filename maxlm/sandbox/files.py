"""Usage and removal of a program's directory on the machine's disk.

The content is untrusted: names and nesting of any length, any permissions, links to any target.
"""

from __future__ import annotations

import contextlib
import os
import secrets

from maxlm.sandbox.limits import SandboxLimits

BLOCK = 512


def exceeds_limits(folder: str, limits: SandboxLimits) -> bool:
    """Returns True if the files of a directory exceed the limits on number or total size."""
    num_files = size = 0
    folders = [folder]
    for path in folders:
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue
        for entry in entries:
            num_files += 1
            with contextlib.suppress(OSError):
                size += entry.stat(follow_symlinks=False).st_blocks * BLOCK
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        if num_files > limits.files or size > limits.disk_bytes:
            return True
    return False


def remove(folder: str) -> None:
    """Removes a directory after all its processes have ended. Files that cannot be removed remain.

    Nested directories are emptied into the top one, so that neither path length nor recursion depth grows.
    """
    with contextlib.suppress(OSError):
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            while names := os.listdir(top):
                for name in names:
                    remove_entry(name, top)
        finally:
            os.close(top)
        os.rmdir(folder)


def remove_entry(name: str, top: int) -> None:
    """Removes a file, or a directory after moving its contents to `top`."""
    try:
        os.unlink(name, dir_fd=top)
        return
    except (IsADirectoryError, PermissionError):
        # Linux raises the former for a directory, other systems the latter.
        pass
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        inner = os.open(name, flags, dir_fd=top)
    except PermissionError:
        # Never reached as root, which can open any directory: chmod would follow a link put in its place.
        os.chmod(name, 0o700, dir_fd=top)
        inner = os.open(name, flags, dir_fd=top)
    try:
        for child in os.listdir(inner):
            os.rename(child, secrets.token_hex(16), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
