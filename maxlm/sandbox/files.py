"""A program's folder where it is one on the machine's disk: how much it holds, and its end.

Whoever filled it meant harm: names and depths are of any length, permissions of any kind, links go anywhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets

from maxlm.sandbox.limits import SandboxLimits

BLOCK = 512


def holds_too_much(folder: str, limits: SandboxLimits) -> bool:
    """Whether the files of a folder are too many or too large together."""
    number = size = 0
    folders = [folder]
    for path in folders:
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue
        for entry in entries:
            number += 1
            with contextlib.suppress(OSError):
                size += entry.stat(follow_symlinks=False).st_blocks * BLOCK
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        if number > limits.files or size > limits.disk_bytes:
            return True
    return False


def remove(folder: str) -> None:
    """Removes a folder whose processes have all ended. What cannot be removed stays.

    Folders in it are emptied into the top one, so neither paths nor the depth of calls grow with them.
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
    """Removes a file, or a folder after its contents have been moved to `top`."""
    try:
        os.unlink(name, dir_fd=top)
        return
    except (IsADirectoryError, PermissionError):
        # Linux says the one of folders, other systems the other.
        pass
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        inner = os.open(name, flags, dir_fd=top)
    except PermissionError:
        # Never as root, who may open it: a link in its place would lead that elsewhere.
        os.chmod(name, 0o700, dir_fd=top)
        inner = os.open(name, flags, dir_fd=top)
    try:
        for child in os.listdir(inner):
            os.rename(child, secrets.token_hex(16), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
