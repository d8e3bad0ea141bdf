"""A control group (cgroup v2) that limits the total usage of one program's processes.

Requires a parent group in which this user may create groups and which delegates memory and pids. Examples are a scope
of `systemd-run --user --scope -p Delegate=yes` and a container with write access to its own group.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from maxlm.sandbox.limits import SandboxLimits

MOUNT = Path('/sys/fs/cgroup')
REQUIRED_CONTROLLERS = {'memory', 'pids'}
# Number of sandbox processes in the group.
OWN_PROCESSES = 1


def find_parent(mount: Path = MOUNT, own_cgroup: Path = Path('/proc/self/cgroup')) -> Path:
    """Returns the group in which programs' groups can be created. Raises OSError with the reason if there is none."""
    lines = own_cgroup.read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith('0::')), None)
    if path is None:
        raise OSError('this process is not in a cgroup v2 group')
    parent = mount / path.lstrip('/')
    delegated = set((parent / 'cgroup.subtree_control').read_text().split())
    if not delegated >= REQUIRED_CONTROLLERS:
        raise OSError(f'{parent} does not delegate {" and ".join(sorted(REQUIRED_CONTROLLERS - delegated))}')
    if not os.access(parent, os.W_OK):
        raise OSError(f'{parent} is not writable')
    return parent


class Group:
    """Control group of one program, below the open directory `parent`. A descriptor is valid in any mount namespace."""

    def __init__(self, parent: int, name: str):
        os.mkdir(name, dir_fd=parent)
        self.parent, self.name = parent, name

    def write(self, file: str, text: str) -> None:
        """Writes one setting."""
        descriptor = os.open(f'{self.name}/{file}', os.O_WRONLY, dir_fd=self.parent)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def limit(self, limits: SandboxLimits) -> None:
        """Limits memory (including files in memory), swap and processes."""
        self.write('memory.max', str(limits.memory_bytes + limits.disk_bytes))
        with contextlib.suppress(OSError):
            self.write('memory.swap.max', '0')
        self.write('memory.oom.group', '1')
        self.write('pids.max', str(limits.processes + OWN_PROCESSES))

    def open_procs(self) -> int:
        """Opens cgroup.procs. A process that writes 0 to it joins the group, as do its later children."""
        return os.open(f'{self.name}/cgroup.procs', os.O_WRONLY, dir_fd=self.parent)

    def out_of_memory(self) -> bool:
        """Returns True if the kernel's OOM killer ran."""
        descriptor = os.open(f'{self.name}/memory.events', os.O_RDONLY, dir_fd=self.parent)
        with os.fdopen(descriptor) as file:
            counts = dict(line.split() for line in file.read().splitlines())
        return int(counts.get('oom_kill', 0)) > 0

    def kill(self) -> None:
        """Kills all processes of the group."""
        with contextlib.suppress(OSError):
            self.write('cgroup.kill', '1')

    def remove(self) -> None:
        """Removes the group if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.name, dir_fd=self.parent)
