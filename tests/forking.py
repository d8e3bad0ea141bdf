"""Starts processes by fork, which saves the seconds of importing JAX and maxlm.

`python -m tests.forking` is the fork server of a test process. It imports each target module once without initializing
JAX's devices. It reads requests, one JSON value per line, and forks a process for each. The process gets the same
arguments, environment and files as with `python -m`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cpu import cpu_flags

# tests.conftest is not imported, because it sets the number of devices.
ROOT = Path(__file__).parent.parent
# The server imports modules without these variables, so that a process without a variable gets its default.
READ_BY_IMPORTS = ('JAX_', 'FSSPEC_', 'COVERAGE_')


class Server:
    """Client of the fork server in the test process."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(READ_BY_IMPORTS)}
        command = [sys.executable, '-m', 'tests.forking']
        pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
        self._numbers = itertools.count()

    def request(self, **fields: Any) -> Any:
        """Sends a request and returns the response."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        number = next(self._numbers)
        print(json.dumps([number, fields]), file=self._process.stdin, flush=True)
        # A test that timed out may have left a response unread.
        answered = -1
        while answered != number:
            answered, response = json.loads(self._process.stdout.readline())
        return response

    def close(self) -> None:
        """Stops the server, which kills all remaining processes."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


@functools.cache
def server() -> Server:
    """Returns the fork server of this process, which stops when this process exits."""
    started = Server()
    atexit.register(started.close)
    return started


class Forked:
    """A forked process with the `subprocess.Popen` methods that tests use."""

    def __init__(self, pid: int, output: Path):
        self.pid, self._output = pid, output
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code (negative after a signal), or None while the process runs."""
        if self.returncode is None:
            self.returncode = server().request(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code; raises TimeoutError after `timeout` seconds."""
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise TimeoutError(f'still running after {timeout} s: {self.stdout}{self.stderr}')
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has exited."""
        # A process keeps its id until it is polled.
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has exited."""
        self.send_signal(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        """Returns the standard output so far."""
        return self._output.read_text()

    @property
    def stderr(self) -> str:
        """Returns the standard error so far."""
        return Path(f'{self._output}.err').read_text()


class Parent:
    """Starts processes with the same target; created by `forking`."""

    def __init__(self, target: str, environment: dict[str, str], directory: Path):
        self._target, self._environment, self._directory = target, environment, directory
        self._started: list[Forked] = []

    def start(self, arguments: Sequence[object], output: Path, environment: Mapping[str, str] | None = None) -> Forked:
        """Starts a process.

        Args:
            arguments: command-line arguments.
            output: file for standard output; standard error goes to the same name with the suffix .err.
            environment: additional environment variables.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        # When the server responds, the process may not have opened the files yet.
        for path in (output, Path(f'{output}.err')):
            path.write_bytes(b'')
        pid = server().request(
            target=self._target,
            arguments=list(map(str, arguments)),
            output=str(output),
            environment={**self._environment, **(environment or {})},
            directory=str(self._directory),
        )
        self._started.append(Forked(pid, output))
        return self._started[-1]

    def start_run(self, count: int, arguments: Sequence[object], folder: Path) -> list[Forked]:
        """Starts `count` processes of one run with outputs in `folder`."""
        run = {'MAXLM_COORDINATOR': f'127.0.0.1:{free_port()}', 'MAXLM_NUM_PROCESSES': str(count)}
        return [
            self.start(
                arguments,
                folder / f'process-{number}.log',
                {**run, 'MAXLM_PROCESS_ID': str(number)} if count > 1 else None,
            )
            for number in range(count)
        ]

    def close(self) -> None:
        """Kills all remaining processes."""
        for process in self._started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def forking(
    target: str, *, devices: int = 1, environment: Mapping[str, str | None] | None = None, directory: Path = ROOT
) -> Iterator[Parent]:
    """Yields a starter of processes that run `target`, and kills remaining processes at the end.

    Args:
        target: MODULE, which runs as with `python -m`, or MODULE:FUNCTION, which is called without arguments.
        devices: number of virtual CPU devices per process.
        environment: variables to set; None removes a variable.
        directory: working directory of the processes.
    """
    settings = {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': cpu_flags(devices),
        # The processes compile the same small programs, so all of them are cached.
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    merged = {**os.environ, **settings, **(environment or {})}
    parent = Parent(target, {name: value for name, value in merged.items() if value is not None}, directory)
    try:
        yield parent
    finally:
        parent.close()


def free_port() -> int:
    """Returns an unused TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    """Serves requests until the input ends."""
    # JAX is imported first, because target modules may set variables that it reads.
    importlib.import_module('jax')
    children: set[int] = set()
    # Separate descriptors, so that children inherit no buffered data.
    requests, responses = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), 'w')
    # Output of imports must not go to the stream of responses.
    os.dup2(2, 1)
    while line := requests.readline():
        number, request = json.loads(line)
        if 'poll' in request:
            pid, status = os.waitpid(request['poll'], os.WNOHANG)
            children.discard(pid)
            response = os.waitstatus_to_exitcode(status) if pid else None
        else:
            # The forked process raises the error again and shows it in its output.
            with contextlib.suppress(Exception):
                importlib.import_module(request['target'].partition(':')[0])
                if request['target'] in ('maxlm.train', 'maxlm.grpo'):
                    # A training command imports these modules only after it has parsed its arguments.
                    for name in ('cli.runs.grpo', 'cli.execution.train', 'rl.rollouts'):
                        importlib.import_module(f'maxlm.{name}')
            with warnings.catch_warnings():
                # Python 3.12 warns about forking because NumPy's BLAS has a thread.
                warnings.simplefilter('ignore', DeprecationWarning)
                response = os.fork()
            if response == 0:
                requests.close()
                responses.close()
                run_target(**request)
                return
            children.add(response)
        print(json.dumps([number, response]), file=responses, flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_target(target: str, arguments: list[str], output: str, environment: dict[str, str], directory: str) -> None:
    """Runs a module or a function in this forked process."""
    os.chdir(directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, path in enumerate((os.devnull, output, f'{output}.err')):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    read_environment()
    if 'COVERAGE_PROCESS_START' in environment:
        # Each test has its own context; see tests/executed_functions.py.
        importlib.import_module('coverage').process_startup()
    module, _, function = target.partition(':')
    sys.argv = [module, *arguments]
    if function:
        sys.exit(getattr(importlib.import_module(module), function)())
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name='__main__', alter_sys=True)


def read_environment() -> None:
    """Applies environment variables that modules otherwise read at import."""
    import jax

    for name, value in os.environ.items():
        key = name.lower()
        if name.startswith('JAX_') and key in jax.config.values:
            kind = type(jax.config.values[key])
            jax.config.update(key, kind(json.loads(value.lower())) if kind in (bool, int, float) else value)
    if 'fsspec.config' in sys.modules:
        config = sys.modules['fsspec.config']
        config.set_conf_env(config.conf)


if __name__ == '__main__':
    main()
