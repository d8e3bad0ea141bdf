"""Seccomp: the system calls that a confined program is refused, compiled to the kernel's packet filter.

It lists what is refused, not what is allowed: CPython and its standard library use most of the kernel's everyday calls,
and differ by version in which. Calls newer than the table are refused as unknown ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from maxlm.sandbox.syscalls import LIBC, PR_SET_SECCOMP, check_errno

# name: (number on x86_64, number on aarch64); None where it does not exist.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Other machines and other processes by sockets; pairs of connected sockets stay, asyncio needs them.
    'socket': (41, 198), 'connect': (42, 203), 'accept': (43, 202), 'bind': (49, 200), 'listen': (50, 201),
    'accept4': (288, 242),
    # Other programs: nothing that a Python program has to start.
    'execve': (59, 221), 'execveat': (322, 281),
    # The memory and descriptors of other processes.
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
    # Memory that no limit of a process counts, or that outlives it.
    'memfd_create': (319, 279), 'memfd_secret': (447, 447), 'shmget': (29, 194), 'shmat': (30, 196),
    'shmctl': (31, 195), 'semget': (64, 190), 'msgget': (68, 186), 'mq_open': (240, 180),
    # Keys, which live in the kernel for a user.
    'add_key': (248, 217), 'request_key': (249, 218), 'keyctl': (250, 219),
    # The view of files, and handles that go around it.
    'mount': (165, 40), 'umount2': (166, 39), 'pivot_root': (155, 41), 'chroot': (161, 51), 'open_tree': (428, 428),
    'move_mount': (429, 429), 'fsopen': (430, 430), 'fsconfig': (431, 431), 'fsmount': (432, 432),
    'fspick': (433, 433), 'mount_setattr': (442, 442), 'name_to_handle_at': (303, 264),
    'open_by_handle_at': (304, 265), 'quotactl': (179, 60), 'quotactl_fd': (443, 443), 'fanotify_init': (300, 262),
    # Namespaces: a new one would bring back privileges.
    'unshare': (272, 97), 'setns': (308, 268),
    # Wide doors into the kernel.
    'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282), 'io_uring_setup': (425, 425),
    'io_uring_enter': (426, 426), 'io_uring_register': (427, 427), 'io_setup': (206, 0), 'personality': (135, 92),
    'modify_ldt': (154, None), 'iopl': (172, None), 'ioperm': (173, None),
    # The machine.
    'init_module': (175, 105), 'finit_module': (313, 273), 'delete_module': (176, 106), 'kexec_load': (246, 104),
    'kexec_file_load': (320, 294), 'reboot': (169, 142), 'swapon': (167, 224), 'swapoff': (168, 225),
    'acct': (163, 89), 'syslog': (103, 116), 'vhangup': (153, 58), 'settimeofday': (164, 170),
    'clock_settime': (227, 112), 'clock_adjtime': (305, 266), 'adjtimex': (159, 171), 'sethostname': (170, 161),
    'setdomainname': (171, 162), 'sync': (162, 81), 'syncfs': (306, 267),
}  # fmt: skip
# Refused as if the kernel did not know it: libc then falls back to clone, whose flags a filter can read.
UNKNOWN = {'clone3': (435, 435)}
CLONE, PRCTL, IOCTL, SOCKETPAIR = (56, 220), (157, 167), (16, 29), (53, 199)
# Calls that name another process, for where no process namespace hides the others.
BY_PID = {'kill': (62, 129), 'tgkill': (234, 131), 'prlimit64': (302, 261), 'sched_setaffinity': (203, 122)}
OTHER_SIGNAL_CALLS = {
    'tkill': (200, 130),
    'rt_sigqueueinfo': (129, 138),
    'rt_tgsigqueueinfo': (297, 240),
    'pidfd_send_signal': (424, 424),
}
# Calls that change a file by its path and that Landlock lets pass, of old kernels also its length; for where no mount
# namespace hides the others' files.
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
# F_SETOWN, F_SETOWN_EX: who gets the signals of a descriptor.
SET_OWNER = (8, 15)
# All of CLONE_NEW*.
NEW_NAMESPACES = 0x7E020000
# To outlive its parent, to take over its orphans.
REFUSED_PRCTL = (1, 36)
# Typing into the terminal; the owner of a descriptor by other names.
REFUSED_IOCTL = (0x5412, 0x541C, 0x8901, 0x8902)
AF_UNIX = 1
# The newest call that was looked at: lsm_list_modules.
LAST_KNOWN = 461
X32_BIT = 0x40000000

ARCHITECTURES = {'x86_64': (0, 0xC000003E), 'aarch64': (1, 0xC00000B7)}
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, GREATER_EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
OFFSET_NUMBER, OFFSET_ARCHITECTURE, OFFSET_ARGUMENTS = 0, 4, 16
SECCOMP_MODE_FILTER = 2

Instruction = tuple[int, int, int, int]


def refuse(number: int = errno.EPERM) -> Instruction:
    """The call fails with that error."""
    return (RETURN, 0, 0, ERRNO | number)


def low_word(argument: int) -> Instruction:
    """Loads the lower half of an argument; both architectures are little-endian."""
    return (LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * argument)


def only_if(number: int, body: list[Instruction]) -> list[Instruction]:
    """`body`, which ends in a return on each way, for one system call."""
    return [(EQUAL, 0, len(body), number), *body]


def argument_in(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Refuses a call whose argument is one of `values`."""
    body = [low_word(argument)]
    for value in values:
        body += [(EQUAL, 0, 1, value), refuse()]
    return [*body, (RETURN, 0, 0, ALLOW)]


def argument_not_in(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Refuses a call whose argument is none of `values`."""
    body = [low_word(argument)]
    for value in values:
        body += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*body, refuse()]


def filter_program(machine: str, *, own_pid: int | None = None, files_visible: bool = False) -> list[Instruction]:
    """The filter for a machine's architecture.

    only_itself: no process but the one of this number and its group can be named, e.g. to signal it, where no process
      namespace hides the others. paths_shown: no mount namespace hides the files of others either. OSError for an
      architecture without a table.
    """
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f'no table of system calls for {machine}')
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
    """struct sock_fprog."""

    _fields_ = [('length', ctypes.c_ushort), ('instructions', ctypes.c_char_p)]


def restrict(*, own_process_only: bool, files_visible: bool) -> None:
    """This process and its children are refused those calls; it needs no_new_privs. See `filter_program`."""
    program = filter_program(
        platform.machine(), own_pid=os.getpid() if own_process_only else None, files_visible=files_visible
    )
    packed = b''.join(struct.pack('=HBBI', *instruction) for instruction in program)
    argument = FilterProgram(len(program), packed)
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    check_errno(LIBC.prctl(PR_SET_SECCOMP, mode, ctypes.byref(argument), zero, zero), 'seccomp')
