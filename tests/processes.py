"""Processes of one run on this machine, each with virtual CPU devices of its own.

`python -m tests.processes FAULT ARGUMENTS…` is `maxlm.train` in which process 1 is at fault when it reads batch 3.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlm import train
from maxlm.errors import InputError, exit_code
from maxlm.runtime import reading
from tests.cpu import cpu_flags
from tests.fork_server import fork_server

# Not that of tests.conftest, which sets the number of devices.
ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


class Processes:
    """While entered, `count` processes that run the same command; leaving kills those that are left."""

    def __init__(
        self,
        count: int,
        devices: int,
        command: list[str],
        *,
        logs: Path,
        cache: Path | None = None,
        module: str = 'maxlm.train',
    ):
        """
        Args:
            count: of processes.
            devices: virtual devices of each.
            command: arguments of `module`.
            logs: directory for what they print.
            cache: of compiled programs; None = that of the test session.
            module: what they run.
        """
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        coordinator = f'127.0.0.1:{free_port()}'
        environment = {
            **os.environ,
            'JAX_PLATFORMS': 'cpu',
            'XLA_FLAGS': cpu_flags(devices),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }
        if cache is not None:
            environment['JAX_COMPILATION_CACHE_DIR'] = str(cache)
        self.all = []
        for number in range(count):
            if count > 1:
                environment |= {
                    'MAXLM_COORDINATOR': coordinator,
                    'MAXLM_NUM_PROCESSES': str(count),
                    'MAXLM_PROCESS_ID': str(number),
                }
            started = fork_server().start(module, command, environment=environment, log=self._log(number))
            self.all.append(started)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            process.kill()
            process.wait()

    def wait(self, timeout: float = 120) -> list[int]:
        """Returns the exit codes of all."""
        return [process.wait(timeout) for process in self.all]

    def output(self, number: int) -> str:
        """Returns what a process has printed so far."""
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
