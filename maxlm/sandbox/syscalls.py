"""System calls for isolation: thin ctypes wrappers that raise OSError."""

from __future__ import annotations

import ctypes
import os

LIBC = ctypes.CDLL(None, use_errno=True)

# sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
# sys/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
# linux/capability.h
CAPABILITY_VERSION_3 = 0x20080522
# Call numbers newer than 423 are the same on all architectures.
NR_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2


def check_errno(result: int, what: str) -> int:
    """Returns the result of a C call. Raises OSError with `what` if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def system_call(number: int, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None, what: str) -> int:
    """Calls the system call `number`. Buffers and structures are passed by address."""
    values: list[object] = []
    for argument in arguments:
        if isinstance(argument, int):
            values.append(ctypes.c_long(argument))
        elif isinstance(argument, bytes) or argument is None:
            values.append(ctypes.c_char_p(argument))
        else:
            values.append(ctypes.byref(argument))
    return check_errno(LIBC.syscall(ctypes.c_long(number), *values), what)


def unshare(flags: int) -> None:
    """Moves this process into new namespaces. A new process namespace applies to its children only."""
    check_errno(LIBC.unshare(ctypes.c_int(flags)), 'unshare')


def mount(source: str, target: str, kind: str | None, flags: int, options: str = '') -> None:
    """Calls mount(2)."""
    encoded = kind.encode() if kind else None
    arguments = os.fsencode(source), os.fsencode(target), encoded, ctypes.c_ulong(flags), options.encode() or None
    check_errno(LIBC.mount(*arguments), f'mount {target}')


def make_read_only(target: str) -> None:
    """Makes the mount at `target` and all mounts below it read-only and ignores their setuid bits."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    system_call(
        NR_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, 32, what=f'mount_setattr {target}'
    )


def change_root(root: str) -> None:
    """Makes the mount point `root` the root directory and detaches the old root from this mount namespace."""
    os.chdir(root)
    check_errno(LIBC.syscall(ctypes.c_long(NR_PIVOT_ROOT), b'.', b'.'), 'pivot_root')
    check_errno(LIBC.umount2(b'.', MNT_DETACH), 'umount')
    os.chdir('/')


NR_PIVOT_ROOT = {'x86_64': 155}.get(os.uname().machine, 41)


def prctl(option: int, value: int, what: str) -> None:
    """Calls prctl(2) with one argument."""
    zero = ctypes.c_ulong(0)
    check_errno(LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero), what)


def drop_capabilities() -> None:
    """Drops all capabilities of this process, permanently if no_new_privs is set."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check_errno(LIBC.capset(header, (ctypes.c_uint32 * 6)()), 'capset')
