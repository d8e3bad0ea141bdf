"""Timeout, memory and file limits of a program in the sandbox."""

from __future__ import annotations

import math
from typing import NamedTuple

from maxlm.errors import InputError

MIB = 1 << 20


class SandboxLimits(NamedTuple):
    """Limits of one program with all processes that it starts. Sizes are bytes."""

    # CPU time of one process, rounded up to a whole second.
    cpu_seconds: float = 5.0
    # From the start of the program to the end of its tests.
    wall_seconds: float = 10.0
    # Address space of a process, and, where the machine allows to watch it, memory of all together.
    memory_bytes: int = 512 * MIB
    # Processes and threads.
    processes: int = 16
    open_files: int = 64
    # One file, and all of them.
    file_bytes: int = 16 * MIB
    disk_bytes: int = 64 * MIB
    files: int = 1000
    # stdout and stderr together; a program that writes more is stopped.
    output_bytes: int = MIB

    def checked(self) -> SandboxLimits:
        """Itself; InputError if a limit is not a positive number."""
        for name, value in self._asdict().items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(f'sandbox limit {name}={value!r} is not a positive number')
        return self
