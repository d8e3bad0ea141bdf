"""Runs untrusted Python programs: responses of a model, for rewards and code benchmarks.

Each program runs in its own process without network, privileges or environment variables. It can access only Python's
files and an empty directory, and all its resources are limited. `Sandbox.missing` lists guarantees that the machine
cannot enforce. A pool does not start if one of the `required` guarantees is missing. Guarantees in addition to limits:

| guarantee | a program |
|---|---|
| files | reads only Python's files and its own, and modifies only its own |
| network | cannot connect to this or any other machine |
| signals | cannot signal, trace or modify processes of others |
| processes | has at most N processes, including all descendants |
| orphans | no process outlives it |
| total memory | has at most `memory_bytes` in all its processes (the limit per process always holds) |
| disk | has at most `disk_bytes` in all its files; without this guarantee it is stopped soon after exceeding them |
| kernel calls | cannot use system calls that such programs never need: keys, mounts, modules, exec and others |

    with SandboxPool(workers=8) as pool:
        jobs = [SandboxJob('print(6 * 7)'), SandboxJob('def f(x): return x', tests='assert f(1) == 1')]
        results = pool.run_many(jobs)

Tests run in a different process (see `maxlm.sandbox.program.rpc_protocol`), so a program cannot access them, their
results or the expected values. All guarantees depend on the Linux kernel: against kernel exploits, use a separate
machine.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import maxlm
from maxlm.errors import InputError
from maxlm.sandbox import monitor
from maxlm.sandbox.files import remove
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.process.interpreter import HEADER, kill, receive, send, start_interpreter
from maxlm.storage.json_text import parse_json

# Guarantee → alternative sets of mechanisms that provide it.
GUARANTEES: dict[str, tuple[tuple[str, ...], ...]] = {
    # Landlock alone does not prevent changes of permissions and times.
    'files': (('mount namespace',), ('landlock', 'seccomp')),
    # Local sockets have names in the file system.
    'network': (('network namespace', 'mount namespace'), ('seccomp',)),
    'signals': (('process namespace',), ('seccomp',)),
    'processes': (('own user',), ('user namespace',), ('cgroup',)),
    'orphans': (('process namespace',), ('memory watch',)),
    'total memory': (('cgroup',), ('memory watch',)),
    'disk': (('mount namespace',),),
    'kernel calls': (('seccomp',),),
}
# Guarantees of the limits that every Linux supports.
ALWAYS_ENFORCED = ('cpu', 'wall', 'memory', 'open files', 'file size', 'output', 'environment')
REQUIRED = ('files', 'network', 'signals')
MECHANISMS = (
    *('root', 'mount namespace', 'network namespace', 'ipc namespace', 'process namespace', 'own user'),
    *('user namespace', 'landlock', 'seccomp', 'cgroup', 'memory watch'),
)
# A fixed hash seed for a constant order of sets.
ENVIRONMENT = {'PYTHONHASHSEED': '0', 'LANG': 'C.UTF-8'}
START_SECONDS = 60.0
# Additional time that a worker has beyond the wall time of its program, on a loaded machine.
GRACE_SECONDS = 20.0
STOP_SECONDS = 3.0
# Maximum number of attempts of a program whose worker dies.
MAX_ATTEMPTS = 2


class SandboxJob(NamedTuple):
    """A program to run.

    Attributes:
        text: source text.
        stdin: standard input.
        tests: source text of tests, in the forms of `maxlm.sandbox.program.unit_tests`.
        limits: limits, or None for those of the pool.
    """

    text: str
    stdin: str = ''
    tests: str = ''
    limits: SandboxLimits | None = None


class ExecutionResult(NamedTuple):
    """Result of a program.

    | status | meaning |
    |---|---|
    | passed | all tests passed; without tests: exit code 0 |
    | failed | the program ran, and some tests failed |
    | error | exception or nonzero exit code, or the tests contain no test |
    | timeout, memory, output | stopped at this limit |
    | killed | stopped because of disk usage, or killed from outside |

    Attributes:
        status: one of the values above.
        stdout: standard output.
        stderr: end of the standard error, followed by messages of the sandbox, which begin with `sandbox: `.
        seconds: wall time.
        exit_code: exit code, negative for a signal; None if the program was stopped.
        tests: number of tests.
        tests_passed: number of passed tests.
    """

    status: str
    stdout: str
    stderr: str
    seconds: float
    exit_code: int | None
    tests: int = 0
    tests_passed: int = 0


class Sandbox(NamedTuple):
    """Guarantees of the sandbox on this machine.

    Attributes:
        mechanisms: kernel mechanisms in use.
        refused: mechanism → reason that it is not in use.
        enforced: names of the guarantees that hold.
        missing: names of the guarantees that do not hold.
    """

    mechanisms: tuple[str, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        unmet = f'; not enforced: {", ".join(self.missing)}' if self.missing else ''
        return f'sandbox with {", ".join(self.mechanisms) or "limits only"}{unmet}'

    @property
    def enforced(self) -> tuple[str, ...]:
        """Guarantees that hold."""
        return (*ALWAYS_ENFORCED, *(name for name in GUARANTEES if name not in self.missing))

    @property
    def missing(self) -> tuple[str, ...]:
        """Guarantees that do not hold."""
        return tuple(
            name
            for name, alternatives in GUARANTEES.items()
            if not any(set(mechanisms) <= set(self.mechanisms) for mechanisms in alternatives)
        )


class SandboxWorker:
    """Process of one worker, as seen by its pool."""

    def __init__(self, settings: str):
        """Starts the process with JSON settings. Call `wait` before sending programs."""
        self.process, self.connection = start_interpreter(
            'maxlm.sandbox.worker:main',
            settings,
            path=[str(Path(maxlm.__file__).parent.parent)],
            environment=ENVIRONMENT,
        )
        self.folder: str | None = None
        self.deadline = 0.0
        self.buffer = bytearray()

    def wait(self) -> Sandbox:
        """Waits until the worker is ready and returns its guarantees.

        Raises:
            RuntimeError: it cannot run programs.
            InputError: it cannot import a function.
        """
        self.connection.settimeout(START_SECONDS)
        try:
            hello = json.loads(receive(self.connection)[1])
        except (EOFError, OSError) as error:
            self.stop(immediately=True)
            raise RuntimeError(f'a sandbox worker did not start: {error}') from None
        self.folder = hello['folder']
        if 'failed' in hello:
            self.stop()
            raise RuntimeError(f'a sandbox worker did not start: {hello["failed"]}')
        if 'invalid' in hello:
            raise InputError(hello['invalid'])
        return Sandbox(tuple(hello['has']), hello['refused'])

    def send(self, program: SandboxJob, limits: SandboxLimits) -> None:
        """Sends a program to the worker. Raises OSError if the worker has died."""
        kind = monitor.TESTED if program.tests.strip() else monitor.PLAIN
        request = {**program._asdict(), 'limits': limits._asdict()}
        self.connection.settimeout(START_SECONDS)
        send(self.connection, kind, json.dumps(request).encode())
        self.deadline = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        self.buffer.clear()

    def receive(self) -> ExecutionResult | None:
        """Reads a chunk of the response and returns the result once it is complete, else None.

        Raises:
            EOFError: the worker has died, or its message is invalid.
            OSError: the worker has died.
        """
        chunk = self.connection.recv(1 << 20)
        if not chunk:
            raise EOFError('the worker has died')
        self.buffer += chunk
        size = HEADER.size
        if len(self.buffer) < size or len(self.buffer) < size + HEADER.unpack(self.buffer[:size])[1]:
            return None
        try:
            return ExecutionResult(**parse_json(bytes(self.buffer[size:])))
        except (ValueError, TypeError) as error:
            raise EOFError(f'the worker sent an invalid message: {error}') from None

    def stop(self, *, immediately: bool = False) -> None:
        """Stops the worker and all its processes. Unless `immediately`, it has time to exit by itself."""
        self.connection.close()
        if not immediately:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        kill(self.process)
        if self.folder is not None:
            remove(self.folder)


class SandboxPool:
    """Workers that run programs in parallel. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        workers: int,
        *,
        limits: SandboxLimits | None = None,
        required: Iterable[str] = REQUIRED,
        without: Iterable[str] = (),
        functions: Sequence[Mapping[str, Any]] = (),
        path: Sequence[str] = (),
        readable: Sequence[str] = (),
    ):
        """Starts the workers.

        Args:
            workers: number of workers.
            limits: limits of programs that have none.
            required: guarantees without which the pool does not start.
            without: mechanisms to disable, for tests; with `root`, workers drop root first.
            functions: arguments of `load_function` for each function that workers import before their first program.
            path: directories that programs search for modules after the standard library.
            readable: files and directories that programs may read in addition to Python's files.

        Raises:
            InputError: an argument is invalid, a function cannot be imported, or the machine cannot enforce a required
                guarantee.
        """
        if workers < 1:
            raise InputError(f'workers={workers}: a sandbox requires at least 1')
        self.limits = (limits or SandboxLimits()).checked()
        disabled = check_names(without, MECHANISMS, 'mechanism')
        self.settings = json.dumps(
            {'without': disabled, 'functions': functions, 'path': path, 'readable': readable}, default=list
        )
        required_guarantees = check_names(required, (*ALWAYS_ENFORCED, *GUARANTEES), 'guarantee')
        self.lock = threading.Lock()
        self.workers: list[SandboxWorker] = []
        self.finalizer = weakref.finalize(self, stop_all, self.workers)
        try:
            for _ in range(workers):
                self.workers.append(SandboxWorker(self.settings))
            sandboxes = [worker.wait() for worker in self.workers]
        except BaseException:
            self.close()
            raise
        self.sandbox = sandboxes[0]
        unmet = [name for name in required_guarantees if name in self.sandbox.missing]
        if unmet:
            self.close()
            reasons = '; '.join(f'{name}: {reason}' for name, reason in self.sandbox.refused.items())
            raise InputError(
                f'this machine cannot enforce {", ".join(unmet)} for untrusted programs ({reasons}); run as '
                'root, or enable unprivileged user namespaces, Landlock and seccomp'
            )

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops all workers and the running programs."""
        self.finalizer()

    def run(self, program: SandboxJob) -> ExecutionResult:
        """Runs one program."""
        return self.run_many([program])[0]

    def run_many(self, programs: Sequence[SandboxJob]) -> list[ExecutionResult]:
        """Runs programs in parallel, one per worker, and returns results in the same order.

        Workers that die are replaced. Their program is retried once before its status is `killed`.

        Raises:
            InputError: limits are invalid.
        """
        limits = [(program.limits or self.limits).checked() for program in programs]
        with self.lock:
            if not self.finalizer.alive:
                raise RuntimeError('the sandbox is closed')
            try:
                return self.run_all(programs, limits)
            except BaseException:
                # Close the pool, because late responses could be mistaken for those of later programs.
                self.close()
                raise

    def run_all(self, programs: Sequence[SandboxJob], limits: Sequence[SandboxLimits]) -> list[ExecutionResult]:
        """Runs programs with the given limits. See `run_many`."""
        results: dict[int, ExecutionResult] = {}
        attempts = [0] * len(programs)
        queue, idle = deque(range(len(programs))), list(range(len(self.workers)))
        with selectors.DefaultSelector() as selector:
            while queue or selector.get_map():
                if not self.finalizer.alive:
                    # Another thread has closed the pool. Without this, its workers would be replaced.
                    raise RuntimeError('the sandbox is closed')
                while queue and idle:
                    worker_index, index = idle.pop(), queue.popleft()
                    attempts[index] += 1
                    with contextlib.suppress(OSError):
                        self.workers[worker_index].send(programs[index], limits[index])
                    selector.register(
                        self.workers[worker_index].connection, selectors.EVENT_READ, (worker_index, index)
                    )
                ready = {key.data for key, _ in selector.select(timeout=1.0)}
                for key in list(selector.get_map().values()):
                    worker_index, index = key.data
                    worker = self.workers[worker_index]
                    result = None
                    try:
                        result = worker.receive() if key.data in ready else None
                        if result is None and time.monotonic() < worker.deadline:
                            continue
                    except (EOFError, OSError):
                        pass
                    selector.unregister(key.fileobj)
                    idle.append(worker_index)
                    if result is None and self.finalizer.alive:
                        self.replace(worker_index)
                        if attempts[index] < MAX_ATTEMPTS:
                            queue.appendleft(index)
                            continue
                        result = ExecutionResult(
                            'killed', '', 'sandbox: the worker died\n', limits[index].wall_seconds, None
                        )
                    results[index] = result
        return [results[index] for index in range(len(programs))]

    def replace(self, worker_index: int) -> None:
        """Replaces a worker that has died or does not respond."""
        self.workers[worker_index].stop(immediately=True)
        self.workers[worker_index] = SandboxWorker(self.settings)
        self.workers[worker_index].wait()


def check_names(names: Iterable[str], all_names: Sequence[str], kind: str) -> tuple[str, ...]:
    """Returns the names. Raises InputError if a name is unknown."""
    chosen = tuple(names)
    for name in chosen:
        if name not in all_names:
            raise InputError(f'unknown sandbox {kind} {name!r}; use one of: {", ".join(all_names)}')
    return chosen


def stop_all(workers: list[SandboxWorker]) -> None:
    """Stops workers in parallel."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.connection.shutdown(socket.SHUT_RDWR)
    for worker in workers:
        worker.stop()
