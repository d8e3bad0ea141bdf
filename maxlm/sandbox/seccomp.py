"""Seccomp: a filter of system calls, compiled to the kernel's BPF.

The table lists refused calls instead of allowed ones, because CPython and its standard library use most common calls,
and the set differs by version. Calls newer than the table fail as unknown (ENOSYS).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from maxlm.sandbox.syscalls import LIBC, PR_SET_SECCOMP, check_errno

# Name → (number on x86_64, number on aarch64); None if the call does not exist.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Connections to other machines and processes. socketpair stays allowed, because asyncio needs it.
    'socket': (41, 198), 'connect': (42, 203), 'accept': (43, 202), 'bind': (49, 200), 'listen': (50, 201),
    'accept4': (288, 242),
    # Execution of other programs.
    'execve': (59, 221), 'execveat': (322, 281),
    # Memory and descriptors of other processes.
    'ptrace': (101, 117), 'process_vm_readv': (310, 270), 'process_vm_writev': (311, 271), 'kcmp': (312, 272),
    'pidfd_getfd': (438, 438), 'process_madvise': (440, 440),
    # Scheduling and memory placement.
    'setpriority': (141, 140),
    'sched_setparam': (142, 118),
    'sched_setscheduler': (144, 119),
    'sched_setattr': (314, 274),
    'ioprio_set': (251, 30),
    'migrate_pages': (256, 238),
    'move_pages': (279, 239),
    'process_mrelease': (448, 448),
    # Memory that no process limit counts, or that outlives the process.
    'memfd_create': (319, 279), 'memfd_secret': (447, 447), 'shmget': (29, 194), 'shmat': (30, 196),
    'shmctl': (31, 195), 'semget': (64, 190), 'msgget': (68, 186), 'mq_open': (240, 180),
    # Kernel keyrings, which persist per user.
    'add_key': (248, 217), 'request_key': (249, 218), 'keyctl': (250, 219),
    # Mounts, and file handles that bypass them.
    'mount': (165, 40), 'umount2': (166, 39), 'pivot_root': (155, 41), 'chroot': (161, 51), 'open_tree': (428, 428),
    'move_mount': (429, 429), 'fsopen': (430, 430), 'fsconfig': (431, 431), 'fsmount': (432, 432),
    'fspick': (433, 433), 'mount_setattr': (442, 442), 'name_to_handle_at': (303, 264),
    'open_by_handle_at': (304, 265), 'quotactl': (179, 60), 'quotactl_fd': (443, 443), 'fanotify_init': (300, 262),
    # New namespaces, which would grant privileges.
    'unshare': (272, 97), 'setns': (308, 268),
    # Interfaces with a large attack surface.
    'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282), 'io_uring_setup': (425, 425),
    'io_uring_enter': (426, 426), 'io_uring_register': (427, 427), 'io_setup': (206, 0), 'personality': (135, 92),
    'modify_ldt': (154, None), 'iopl': (172, None), 'ioperm': (173, None),
    # Machine-wide settings.
    'init_module': (175, 105), 'finit_module': (313, 273), 'delete_module': (176, 106), 'kexec_load': (246, 104),
    'kexec_file_load': (320, 294), 'reboot': (169, 142), 'swapon': (167, 224), 'swapoff': (168, 225),
    'acct': (163, 89), 'syslog': (103, 116), 'vhangup': (153, 58), 'settimeofday': (164, 170),
    'clock_settime': (227, 112), 'clock_adjtime': (305, 266), 'adjtimex': (159, 171), 'sethostname': (170, 161),
    'setdomainname': (171, 162), 'sync': (162, 81), 'syncfs': (306, 267),
}  # fmt: skip
# Fails as unknown (ENOSYS): libc then falls back to clone, whose flags a filter can check.
UNKNOWN = {'clone3': (435, 435)}
CLONE, PRCTL, IOCTL, SOCKETPAIR = (56, 220), (157, 167), (16, 29), (53, 199)
# Calls that take a process id. Checked if no process namespace hides other processes.
BY_PID = {'kill': (62, 129), 'tgkill': (234, 131), 'prlimit64': (302, 261), 'sched_setaffinity': (203, 122)}
OTHER_SIGNAL_CALLS = {
    'tkill': (200, 130),
    'rt_sigqueueinfo': (129, 138),
    'rt_tgsigqueueinfo': (297, 240),
    'pidfd_send_signal': (424, 424),
}
# Calls that modify a file by path and that Landlock does not control (truncate only in older kernels). Refused if no
# mount namespace hides other files.
BY_PATH: dict[str, tuple[int | None, int | None]] = {
    'chmod': (90, None),
    'fchmodat': (268, 53),
    'fchmodat2': (452, 452),
    'chown': (92, None),
    'lchown': (94, None),
    'fchownat': (260, 54),
    'utime': (132, None),
    'utimes': (235, None),
    'futimesat': (261, None),
    'utimensat': (280, 88),
    'setxattr': (188, 5),
    'lsetxattr': (189, 6),
    'removexattr': (197, 14),
    'lremovexattr': (198, 15),
    'truncate': (76, 45),
}
FCNTL = (72, 25)
# F_SETOWN, F_SETOWN_EX: set the receiver of a descriptor's signals.
SET_OWNER = (8, 15)
# All CLONE_NEW* flags.
NEW_NAMESPACES = 0x7E020000
# PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER: outlive the parent, adopt orphans.
REFUSED_PRCTL = (1, 36)
# TIOCSTI and TIOCLINUX (terminal input), FIOSETOWN and SIOCSPGRP (receiver of signals).
REFUSED_IOCTL = (0x5412, 0x541C, 0x8901, 0x8902)
AF_UNIX = 1
# Newest call covered by the table: lsm_list_modules.
LAST_KNOWN = 461
X32_BIT = 0x40000000

ARCHITECTURES = {'x86_64': (0, 0xC000003E), 'aarch64': (1, 0xC00000B7)}
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, GREATER_EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
OFFSET_NUMBER, OFFSET_ARCHITECTURE, OFFSET_ARGUMENTS = 0, 4, 16
SECCOMP_MODE_FILTER = 2

Instruction = tuple[int, int, int, int]


def refuse(number: int = errno.EPERM) -> Instruction:
    """Returns an instruction that fails the call with an error number."""
    return (RETURN, 0, 0, ERRNO | number)


def low_word(argument: int) -> Instruction:
    """Loads the lower 32 bits of an argument. Both architectures are little-endian."""
    return (LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * argument)


def only_if(number: int, body: list[Instruction]) -> list[Instruction]:
    """Applies `body` to one system call. Every path of `body` must end in a return."""
    return [(EQUAL, 0, len(body), number), *body]


def argument_in(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Returns instructions that refuse a call if the argument is one of `values`."""
    body = [low_word(argument)]
    for value in values:
        body += [(EQUAL, 0, 1, value), refuse()]
    return [*body, (RETURN, 0, 0, ALLOW)]


def argument_not_in(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Returns instructions that refuse a call unless the argument is one of `values`."""
    body = [low_word(argument)]
    for value in values:
        body += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*body, refuse()]


def filter_program(machine: str, *, own_pid: int | None = None, files_visible: bool = False) -> list[Instruction]:
    """Returns the filter for an architecture.

    Args:
        machine: architecture, as in `platform.machine()`.
        own_pid: if given, calls that take a process id may name only this process. Use it without a process namespace.
        files_visible: refuse calls that modify files by path. Use it without a mount namespace.

    Raises:
        OSError: the architecture has no table of system calls.
    """
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f'unsupported architecture {machine}')
    column, architecture = ARCHITECTURES[machine]
    program: list[Instruction] = [
        (LOAD, 0, 0, OFFSET_ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, OFFSET_NUMBER), (GREATER_EQUAL, 0, 1, LAST_KNOWN + 1), refuse(errno.ENOSYS),
    ]  # fmt: skip
    for numbers in (*REFUSED.values(), *(BY_PATH.values() if files_visible else ())):
        number = numbers[column]
        if number is not None:
            program += only_if(number, [refuse()])
    program += only_if(UNKNOWN['clone3'][column], [refuse(errno.ENOSYS)])
    flags: list[Instruction] = [low_word(0), (ANY_BIT, 0, 1, NEW_NAMESPACES), refuse(), (RETURN, 0, 0, ALLOW)]
    program += only_if(CLONE[column], flags)
    program += only_if(PRCTL[column], argument_in(0, REFUSED_PRCTL))
    program += only_if(IOCTL[column], argument_in(1, REFUSED_IOCTL))
    program += only_if(SOCKETPAIR[column], argument_not_in(0, (AF_UNIX,)))
    if own_pid is not None:
        for numbers in BY_PID.values():
            program += only_if(numbers[column], argument_not_in(0, (own_pid, 0)))
        for numbers in OTHER_SIGNAL_CALLS.values():
            program += only_if(numbers[column], [refuse()])
        program += only_if(FCNTL[column], argument_in(1, SET_OWNER))
    return [*program, (RETURN, 0, 0, ALLOW)]


class FilterProgram(ctypes.Structure):
    """C structure `sock_fprog`."""

    _fields_ = [('length', ctypes.c_ushort), ('instructions', ctypes.c_char_p)]


def restrict(*, own_process_only: bool, files_visible: bool) -> None:
    """Installs the filter for this process and its children. Requires no_new_privs. See `filter_program`."""
    program = filter_program(
        platform.machine(), own_pid=os.getpid() if own_process_only else None, files_visible=files_visible
    )
    packed = b''.join(struct.pack('=HBBI', *instruction) for instruction in program)
    argument = FilterProgram(len(program), packed)
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    check_errno(LIBC.prctl(PR_SET_SECCOMP, mode, ctypes.byref(argument), zero, zero), 'seccomp')
