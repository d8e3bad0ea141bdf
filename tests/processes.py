"""Starts the processes of one run on this machine, each with virtual CPU devices of its own.

`python -m tests.processes FAULT ARGUMENTS…` is `maxlm.train` in which process 1 is at fault when it reads batch 3.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlm import train
from maxlm.errors import InputError, exit_code
from maxlm.runtime import reading
from tests.cpu import cpu_flags

# Not that of tests.conftest, which sets the number of devices.
ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


class Processes:
    """While entered, `count` processes that run the same command; leaving kills those that are left."""

    def __init__(
        self, count: int, devices: int, command: list[str], *, logs: Path, cache: Path, module: str = 'maxlm.train'
    ):
        """
        Args:
            count: of processes.
            devices: virtual devices of each.
            command: arguments of `module`.
            logs: directory for what they print.
            cache: of compiled programs, shared by all.
            module: what they run.
        """
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        coordinator = f'127.0.0.1:{free_port()}'
        self.all = []
        for number in range(count):
            environment = {
                **os.environ,
                'JAX_PLATFORMS': 'cpu',
                'XLA_FLAGS': cpu_flags(devices),
                'JAX_COMPILATION_CACHE_DIR': str(cache),
                'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
                'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
            }
            if count > 1:
                environment |= {
                    'MAXLM_COORDINATOR': coordinator,
                    'MAXLM_NUM_PROCESSES': str(count),
                    'MAXLM_PROCESS_ID': str(number),
                }
            with self._log(number).open('w') as log:
                process = subprocess.Popen(
                    [sys.executable, '-m', module, *command], cwd=ROOT, env=environment, stdout=log, stderr=log
                )
            self.all.append(process)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            process.kill()
            process.wait()

    def wait(self, timeout: float = 120) -> list[int]:
        """The exit codes of all."""
        return [process.wait(timeout) for process in self.all]

    def output(self, number: int) -> str:
        """What a process has printed so far."""
        return self._log(number).read_text()

    def _log(self, number: int) -> Path:
        return self._logs / f'process-{number}.log'


def main(fault: str, arguments: list[str]) -> int:
    """Trains with a fault: `hang` = the main thread sleeps for ever, `bad_input` = a damaged shard."""
    iterate = reading.iterate

    def faulty(*args: Any) -> Iterator[Any]:
        for number, batch in enumerate(iterate(*args), start=1):
            if number == 3 and os.environ['MAXLM_PROCESS_ID'] == '1':
                if fault == 'bad_input':
                    raise InputError('train-00000: damaged')
                print('hangs', flush=True)
                while True:
                    time.sleep(1)
            yield batch

    reading.iterate = faulty
    return exit_code(train.main, arguments)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1], sys.argv[2:]))
