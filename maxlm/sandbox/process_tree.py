"""Descendants of a process as shown in /proc: listing, memory and killing."""

from __future__ import annotations

import os
import signal
import time

PAGE = os.sysconf('SC_PAGE_SIZE')
KIB = 1024
# Timeout on a loaded machine; an idle one takes milliseconds.
SWEEP_SECONDS = 10.0
PAUSE_SECONDS = 0.001


class ProcessTree:
    """Looks through an open /proc, so that it works wherever / has gone since; numbers are those of that /proc."""

    def __init__(self) -> None:
        """OSError without a /proc that lists children."""
        self.folder = os.open('/proc', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.descendants()

    def read(self, path: str) -> str:
        """A file in it; empty if the process has gone."""
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.folder)
            with os.fdopen(descriptor, errors='replace') as file:
                return file.read()
        except OSError:
            return ''

    def own_pid(self) -> str:
        """This process; OSError if it is not shown."""
        return os.readlink('self', dir_fd=self.folder)

    def children(self, pid: str) -> list[str]:
        """Returns the children of all threads of a process."""
        try:
            descriptor = os.open(f'{pid}/task', os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.folder)
        except OSError:
            return []
        try:
            threads = os.listdir(descriptor)
        except OSError:
            return []
        finally:
            os.close(descriptor)
        return [child for thread in threads for child in self.read(f'{pid}/task/{thread}/children').split()]

    def descendants(self) -> list[str]:
        """Returns all descendants of this process, parents first."""
        pids = self.children(self.own_pid())
        for pid in pids:
            pids.extend(self.children(pid))
        return pids

    def live_descendants(self) -> list[str]:
        """Returns descendants that have not ended."""
        states = {pid: self.read(f'{pid}/stat').rpartition(')')[2].split() for pid in self.descendants()}
        return [pid for pid, fields in states.items() if fields and fields[0] not in 'ZX']

    def memory(self, threshold: int) -> int:
        """Bytes that descendants hold besides files of the disk; exact only above `threshold`.

        Pages that forks share are counted in each of them by the quick way, and once by the exact one.
        """
        pids = self.descendants()
        rss = 0
        for pid in pids:
            fields = self.read(f'{pid}/statm').split()
            rss += int(fields[1]) * PAGE if len(fields) > 1 else 0
        if rss <= threshold:
            return rss
        pss = 0
        for pid in pids:
            for line in self.read(f'{pid}/smaps_rollup').splitlines():
                if line.startswith(('Pss_Anon:', 'Pss_Shmem:')):
                    pss += int(line.split()[1]) * KIB
        return pss

    def kill_all(self, exclude: str = '') -> None:
        """Kills all descendants but `exclude`, also those that fork meanwhile, and reaps what has ended.

        For a worker without a process namespace, whose numbers are those of /proc, and which is the one that gets the
        children of those who die: while a descendant lives it is this process's child or below one. A look at the whole
        tree is not proof, since whoever changes parents between two reads is seen below neither.
        """
        deadline = time.monotonic() + SWEEP_SECONDS
        while time.monotonic() < deadline:
            pids = [pid for pid in self.live_descendants() if pid != exclude]
            # Stopped first: who is stopped forks no more.
            for signal_number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    try:
                        os.kill(int(pid), signal_number)
                    except OSError:
                        continue
            reap()
            if set(self.children(self.own_pid())) <= {exclude}:
                return
            time.sleep(PAUSE_SECONDS)


def reap() -> bool:
    """Reaps children that have ended; returns False if there are none left."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
        except ChildProcessError:
            return False
