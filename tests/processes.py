"""Processes of one run on this machine; each has its own virtual CPU devices.

`python -m tests.processes FAULT ARGUMENTS…` runs `maxlm train`, where process 1 fails when it reads batch 3.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlm.cli.runs import train
from maxlm.errors import InputError, exit_code
from maxlm.trainer import batch_source
from tests.forking import forking


class Processes(contextlib.AbstractContextManager['Processes']):
    """Processes that run the same command; leaving the context kills the remaining ones."""

    def __init__(self, count: int, devices: int, command: list[str], *, logs: Path, module: str = 'maxlm.train'):
        """
        Args:
            count: number of processes.
            devices: number of virtual devices per process.
            command: arguments of `module`.
            logs: directory for the output of the processes.
            module: module that the processes run.
        """
        self._stack = contextlib.ExitStack()
        self.all = self._stack.enter_context(forking(module, devices=devices)).start_run(count, command, logs)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait(self, timeout: float = 120) -> list[int]:
        """Waits for all processes and returns their exit codes."""
        return [process.wait(timeout) for process in self.all]

    def output(self, number: int) -> str:
        """Returns the output of a process so far: standard output, then standard error."""
        return self.all[number].stdout + self.all[number].stderr


def main(fault: str, arguments: list[str]) -> int:
    """Trains with a fault: `hang` makes the main thread sleep forever, `bad_input` simulates a damaged shard."""
    iterate = batch_source.iterate

    def faulty(*args: Any) -> Iterator[Any]:
        for number, batch in enumerate(iterate(*args), start=1):
            if number == 3 and os.environ['MAXLM_PROCESS_ID'] == '1':
                if fault == 'bad_input':
                    raise InputError('train-00000: damaged')
                print('hangs', flush=True)
                while True:
                    time.sleep(1)
            yield batch

    batch_source.iterate = faulty
    return exit_code(train.main, arguments)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1], sys.argv[2:]))
