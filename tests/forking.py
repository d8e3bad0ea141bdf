"""Starts several processes of one program for the imports of one: `python -m tests.forking MODULE:FUNCTION`.

The parent imports the module, asks nothing of JAX, and forks a process for each request that it reads. What JAX reads
from the environment when it is imported is the same for all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cpu import cpu_flags

# Not that of tests.conftest, which sets the number of devices.
ROOT = Path(__file__).parent.parent


class Forked:
    """A process that the parent has forked, as `subprocess.Popen` shows one."""

    def __init__(self, parent: Parent, pid: int, output: Path):
        self.pid, self._parent, self._output = pid, parent, output
        self.returncode: int | None = None

    def wait(self, timeout: float = math.inf) -> int:
        """Returns the exit code, below 0 after a signal."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = self._parent.ask({'poll': self.pid})
            assert self.returncode is not None or time.monotonic() < deadline, f'still running: {self.stdout}'
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process."""
        os.kill(self.pid, number)

    @property
    def stdout(self) -> str:
        """All that was printed so far."""
        return self._output.read_text()

    @property
    def stderr(self) -> str:
        """All that was printed to standard error so far."""
        return Path(f'{self._output}.err').read_text()


class Parent:
    """The parent, seen from the test. `forking` makes one."""

    def __init__(self, function: str, environment: dict[str, str]):
        command = [sys.executable, '-m', 'tests.forking', function]
        pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)

    def start(self, arguments: Sequence[object], output: Path, environment: dict[str, str] | None = None) -> Forked:
        """Forks a process.

        Args:
            arguments: its command line.
            output: file for its standard output; that of standard error lies beside it.
            environment: variables to set, for what is not read by imports.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        request = {'arguments': list(map(str, arguments)), 'output': str(output), 'environment': environment or {}}
        return Forked(self, self.ask(request), output)

    def start_run(self, count: int, arguments: Sequence[object], folder: Path) -> list[Forked]:
        """Forks `count` processes of one run, whose outputs go to `folder`."""
        together = {'MAXLM_COORDINATOR': f'127.0.0.1:{free_port()}', 'MAXLM_NUM_PROCESSES': str(count)}
        return [
            self.start(arguments, folder / f'process-{number}.log', {**together, 'MAXLM_PROCESS_ID': str(number)})
            for number in range(count)
        ]

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the parent, which kills the processes that are left."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def forking(
    function: str, *, devices: int = 1, environment: Mapping[str, str | None] | None = None
) -> Iterator[Parent]:
    """Yields the parent of processes that call `function`.

    Args:
        function: as MODULE:NAME. It takes the arguments of the command line, or nothing and reads `sys.argv`.
        devices: virtual CPU devices of each process.
        environment: variables to set; None removes one.
    """
    settings = {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': cpu_flags(devices),
        # They compile the same small programs.
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    merged = {**os.environ, **settings, **(environment or {})}
    parent = Parent(function, {name: value for name, value in merged.items() if value is not None})
    try:
        yield parent
    finally:
        parent.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port: int = listener.getsockname()[1]
        return port


def main(name: str) -> None:
    """Serves requests until the input ends."""
    module, _, function = name.partition(':')
    run = getattr(importlib.import_module(module), function)
    takes_arguments = bool(inspect.signature(run).parameters)
    children: set[int] = set()
    # By descriptor: nothing is buffered that a child would read or write again.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), 'w')
    while line := requests.readline():
        request = json.loads(line)
        if 'poll' in request:
            pid, status = os.waitpid(request['poll'], os.WNOHANG)
            children.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            requests.close()
            answers.close()
            become(request)
            sys.exit(run(*([sys.argv[1:]] if takes_arguments else [])))
        else:
            children.add(answer)
        print(json.dumps(answer), file=answers, flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def become(request: dict[str, Any]) -> None:
    """Gives a forked process its command line, environment, input and outputs."""
    sys.argv[1:] = request['arguments']
    os.environ.update(request['environment'])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, path in enumerate(('/dev/null', request['output'], f'{request["output"]}.err')):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)


if __name__ == '__main__':
    main(sys.argv[1])
