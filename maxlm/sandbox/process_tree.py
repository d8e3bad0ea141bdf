"""The processes below one, as /proc shows them: who they are, how much memory they hold, and their end."""

from __future__ import annotations

import os
import signal
import time

PAGE = os.sysconf('SC_PAGE_SIZE')
KIB = 1024
# Of a machine that has much else to do; an idle one takes milliseconds.
SWEEP_SECONDS = 10.0
PAUSE_SECONDS = 0.001


class ProcessTree:
    """Looks through an open /proc, so that it works wherever / has gone since; numbers are those of that /proc."""

    def __init__(self) -> None:
        """OSError without a /proc that lists children."""
        self.folder = os.open('/proc', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.below()

    def read(self, path: str) -> str:
        """A file in it; empty if the process has gone."""
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.folder)
            with os.fdopen(descriptor, errors='replace') as file:
                return file.read()
        except OSError:
            return ''

    def own_number(self) -> str:
        """This process; OSError if it is not shown."""
        return os.readlink('self', dir_fd=self.folder)

    def children(self, number: str) -> list[str]:
        """Of all threads of a process."""
        try:
            descriptor = os.open(f'{number}/task', os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.folder)
        except OSError:
            return []
        try:
            threads = os.listdir(descriptor)
        except OSError:
            return []
        finally:
            os.close(descriptor)
        return [child for thread in threads for child in self.read(f'{number}/task/{thread}/children').split()]

    def below(self) -> list[str]:
        """All descendants of this process, parents first."""
        found = self.children(self.own_number())
        for number in found:
            found.extend(self.children(number))
        return found

    def living(self) -> list[str]:
        """Descendants that have not ended."""
        states = {number: self.read(f'{number}/stat').rpartition(')')[2].split() for number in self.below()}
        return [number for number, fields in states.items() if fields and fields[0] not in 'ZX']

    def memory(self, enough: int) -> int:
        """Bytes that descendants hold besides files of the disk; exact only above `enough`.

        Pages that forks share are counted in each of them by the quick way, and once by the exact one.
        """
        numbers = self.below()
        quick = 0
        for number in numbers:
            fields = self.read(f'{number}/statm').split()
            quick += int(fields[1]) * PAGE if len(fields) > 1 else 0
        if quick <= enough:
            return quick
        exact = 0
        for number in numbers:
            for line in self.read(f'{number}/smaps_rollup').splitlines():
                if line.startswith(('Pss_Anon:', 'Pss_Shmem:')):
                    exact += int(line.split()[1]) * KIB
        return exact

    def sweep(self, spare: str = '') -> None:
        """Kills all descendants but `spare`, also those that fork meanwhile, and reaps what has ended.

        For a worker without a process namespace, whose numbers are those of /proc, and which is the one that gets the
        children of those who die: while a descendant lives it is this process's child or below one. A look at the whole
        tree is not proof, since whoever changes parents between two reads is seen below neither.
        """
        deadline = time.monotonic() + SWEEP_SECONDS
        while time.monotonic() < deadline:
            numbers = [number for number in self.living() if number != spare]
            # Stopped first: who is stopped forks no more.
            for signal_number in (signal.SIGSTOP, signal.SIGKILL):
                for number in numbers:
                    try:
                        os.kill(int(number), signal_number)
                    except OSError:
                        continue
            reap()
            if set(self.children(self.own_number())) <= {spare}:
                return
            time.sleep(PAUSE_SECONDS)


def reap() -> bool:
    """Takes leave of children that have ended; False if there are none left at all."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
        except ChildProcessError:
            return False
