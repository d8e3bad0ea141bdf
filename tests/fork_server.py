"""Server that starts Python processes by fork: they skip the seconds that importing maxlm and JAX takes.

`python -m tests.fork_server` imports them once, asks nothing of JAX's devices, and serves requests on its standard
input, one JSON object a line. A started process sees the environment and the arguments that `python -m` would give it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PRELOADED = ('maxlm.train', 'maxlm.grpo', 'maxlm.evaluate')


class Forked:
    """A process of the server, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, server: ForkServer, pid: int):
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        # A process that nobody has polled keeps its id.
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The server process of this one."""

    def __init__(self) -> None:
        command = [sys.executable, '-m', 'tests.fork_server']
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + '\n')
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, module: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Forked:
        """Starts `python -m MODULE ARGUMENTS…`, which writes into `log`."""
        words = [str(argument) for argument in arguments]
        return Forked(self, self.ask(module=module, arguments=words, environment=dict(environment), log=str(log)))

    def close(self) -> None:
        """Ends the server, and the processes that are left."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """Returns the server of this process, which ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def _become(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Runs a module in this process, as `python -m` does."""
    import jax

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    changed = {name for name, value in environment.items() if os.environ.get(name) != value}
    os.environ.clear()
    os.environ.update(environment)
    # JAX has read its variables while the server imported it.
    for name in changed:
        key = name.lower()
        if name.startswith('JAX_') and key in jax.config.values:
            kind = type(jax.config.values[key])
            jax.config.update(key, kind(environment[name]) if kind in (int, float) else environment[name])
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name='__main__', alter_sys=True)


def main() -> None:
    """Serves until its standard input is closed."""
    for module in PRELOADED:
        importlib.import_module(module)
    running: set[int] = set()
    for line in iter(sys.stdin.readline, ''):
        request = json.loads(line)
        if 'poll' in request:
            pid, status = os.waitpid(request['poll'], os.WNOHANG)
            running.discard(pid)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(**request)
            return
        running.add(pid)
        print(json.dumps(pid), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == '__main__':
    main()
