"""Landlock: restricts a process to given files and directories, and its signals to its own domain."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from maxlm.sandbox.syscalls import system_call

NR_CREATE_RULESET, NR_ADD_RULE, NR_RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
# Rights in the bit order of linux/landlock.h.
RIGHTS = (
    *('execute', 'write_file', 'read_file', 'read_dir', 'remove_dir', 'remove_file', 'make_char', 'make_dir'),
    *('make_reg', 'make_sock', 'make_fifo', 'make_block', 'make_sym', 'refer', 'truncate', 'ioctl_dev'),
)
RIGHT_BITS = {name: 1 << index for index, name in enumerate(RIGHTS)}
# ABI version → number of rights.
NUM_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
READ = RIGHT_BITS['read_file'] | RIGHT_BITS['read_dir']
# Excludes creating devices and sockets, and executing programs.
WRITE = sum(RIGHT_BITS.values()) & ~(
    RIGHT_BITS['execute'] | RIGHT_BITS['make_char'] | RIGHT_BITS['make_block'] | RIGHT_BITS['make_sock']
)
FILE_RIGHTS = RIGHT_BITS['read_file'] | RIGHT_BITS['write_file'] | RIGHT_BITS['truncate']
TCP = 0b11
SCOPES = 0b11


def version() -> int:
    """Returns the version of the Landlock ABI. Raises OSError if Landlock is missing or disabled."""
    return system_call(NR_CREATE_RULESET, 0, 0, VERSION_FLAG, what='landlock_create_ruleset')


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restricts this process and its children.

    They can read only `readable` and `writable` files or directories, write only `writable` ones, and execute no
    programs. They cannot use TCP (ABI 4 and later). Signals and abstract sockets reach only the same domain (ABI 6 and
    later). Requires no_new_privs. Paths that do not exist are ignored.
    """
    abi = version()
    handled = (1 << NUM_RIGHTS_BY_ABI.get(abi, len(RIGHTS))) - 1
    fields = [handled, *([TCP] if abi >= 4 else []), *([SCOPES] if abi >= 6 else [])]
    attributes = (ctypes.c_uint64 * len(fields))(*fields)
    ruleset = system_call(NR_CREATE_RULESET, attributes, 8 * len(fields), 0, what='landlock_create_ruleset')
    try:
        for paths, allowed in ((readable, READ), (writable, READ | WRITE)):
            for path in paths:
                add_path(ruleset, path, allowed & handled)
        system_call(NR_RESTRICT_SELF, ruleset, 0, what='landlock_restrict_self')
    finally:
        os.close(ruleset)


def add_path(ruleset: int, path: str, allowed: int) -> None:
    """Allows the rights on a path and everything below it."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            allowed &= FILE_RIGHTS
        rule = struct.pack('=Qi', allowed, descriptor)
        system_call(NR_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0, what='landlock_add_rule')
    finally:
        os.close(descriptor)
