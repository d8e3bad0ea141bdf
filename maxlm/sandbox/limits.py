"""Sandbox timeout, memory limit and file limits of a program."""

from __future__ import annotations

import math
from typing import NamedTuple

from maxlm.errors import InputError

MIB = 1 << 20


class SandboxLimits(NamedTuple):
    """Limits of one program and all its processes. Sizes are in bytes.

    Attributes:
        cpu_seconds: CPU time of each process, rounded up to a whole second.
        wall_seconds: time from the start of the program to the end of its tests.
        memory_bytes: address space of each process and, if the machine supports it, total memory of all processes.
        processes: number of processes and threads.
        open_files: number of open files of each process.
        file_bytes: size of each file.
        disk_bytes: total size of all files.
        files: number of files.
        output_bytes: total size of stdout and stderr. A program that exceeds it is stopped.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 10.0
    memory_bytes: int = 512 * MIB
    processes: int = 16
    open_files: int = 64
    file_bytes: int = 16 * MIB
    disk_bytes: int = 64 * MIB
    files: int = 1000
    output_bytes: int = MIB

    def checked(self) -> SandboxLimits:
        """Returns the limits. Raises InputError if a limit is not a positive number."""
        for name, value in self._asdict().items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(f'sandbox limit {name}={value!r}: must be a positive number')
        return self
