"""Descendants of a process according to /proc: listing, memory usage and termination."""

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
    """Process tree, read through a descriptor of /proc, which stays valid after / changes. Ids are those of /proc."""

    def __init__(self) -> None:
        """Opens /proc. Raises OSError if it does not exist or does not list children."""
        self.folder = os.open('/proc', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.descendants()

    def read(self, path: str) -> str:
        """Reads a file below /proc. Returns '' if the process has ended."""
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.folder)
            with os.fdopen(descriptor, errors='replace') as file:
                return file.read()
        except OSError:
            return ''

    def own_pid(self) -> str:
        """Returns the id of this process. Raises OSError if /proc does not show it."""
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
        """Returns descendants that are not zombies."""
        states = {pid: self.read(f'{pid}/stat').rpartition(')')[2].split() for pid in self.descendants()}
        return [pid for pid, fields in states.items() if fields and fields[0] not in 'ZX']

    def memory(self, threshold: int) -> int:
        """Returns the memory of all descendants in bytes, without file pages; exact only above `threshold`.

        First sums resident memory, which counts pages shared by forks once per process and includes file pages. If the
        sum exceeds `threshold`, the proportional set size is used, which counts shared pages once.
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
        """Kills all descendants except `exclude`, including those that fork meanwhile, and reaps ended processes.

        For a worker without a process namespace, whose ids equal those of /proc, and which is a subreaper. A living
        descendant is therefore below a child of this process, and the loop ends when there are no such children.
        The listing of the complete tree is no proof, because it can miss processes that are reparented meanwhile.
        """
        deadline = time.monotonic() + SWEEP_SECONDS
        while time.monotonic() < deadline:
            pids = [pid for pid in self.live_descendants() if pid != exclude]
            # Stop all processes first, because a stopped process cannot fork.
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
    """Reaps children that have ended. Returns False if no children are left."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
        except ChildProcessError:
            return False
