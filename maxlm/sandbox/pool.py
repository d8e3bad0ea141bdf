"""Runs Python programs that nobody has read: answers of a model, for rewards and for benchmarks of code.

A program gets a process of its own without network, privileges, environment, or files but Python's and an empty folder,
and limits on everything that it could use up. What the machine cannot enforce is said in `Sandbox.missing`, and a pool
refuses to start without what is `required`. The guarantees beside the limits:

| guarantee | a program |
|---|---|
| files | reads Python's and its own, and changes only its own |
| network | reaches nobody, on this machine or another |
| signals | neither signals, traces nor otherwise changes processes but its own |
| processes | has so many at most, all its children counted |
| orphans | leaves none behind |
| total memory | with all its processes has so much at most (`memory_bytes` holds for each in any case) |
| disk | with all its files has so much at most; else it is stopped soon after |
| kernel calls | is refused those that no program of this kind needs: keys, mounts, modules, other programs … |

    with SandboxPool(workers=8) as pool:
        results = pool.run_many([Program('print(6 * 7)'), Program('def f(x): return x', tests='assert f(1) == 1')])

Tests run in another process than the program (see `rpc_protocol`), so it cannot reach them, their outcome or what they
expect. All guarantees depend on the Linux kernel: against kernel exploits, use a separate machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import maxlm
from maxlm.errors import InputError
from maxlm.sandbox import monitor
from maxlm.sandbox.files import remove
from maxlm.sandbox.limits import SandboxLimits

# Guarantee → alternative sets of mechanisms that provide it.
GUARANTEES: dict[str, tuple[tuple[str, ...], ...]] = {
    # Landlock alone would let it change permissions and times.
    'files': (('mount namespace',), ('landlock', 'seccomp')),
    # Sockets of the machine have names among its files.
    'network': (('network namespace', 'mount namespace'), ('seccomp',)),
    'signals': (('process namespace',), ('seccomp',)),
    'processes': (('own user',), ('user namespace',), ('cgroup',)),
    'orphans': (('process namespace',), ('memory watch',)),
    'total memory': (('cgroup',), ('memory watch',)),
    'disk': (('mount namespace',),),
    'kernel calls': (('seccomp',),),
}
# Held by limits that every Linux has.
ALWAYS_ENFORCED = ('cpu', 'wall', 'memory', 'open files', 'file size', 'output', 'environment')
REQUIRED = ('files', 'network', 'signals')
MECHANISMS = (
    *('root', 'mount namespace', 'network namespace', 'ipc namespace', 'process namespace', 'own user'),
    *('user namespace', 'landlock', 'seccomp', 'cgroup', 'memory watch'),
)
# No site packages, no user's folder, none of PYTHON… but one: sets are iterated in the same order in every worker.
INTERPRETER_OPTIONS = ('-s', '-S', '-P', '-B')
ENVIRONMENT = {'PYTHONHASHSEED': '0', 'LANG': 'C.UTF-8'}
BOOTSTRAP = (
    'import sys; sys.path.insert(0, sys.argv[1]); from maxlm.sandbox.worker import main; '
    'sys.path.pop(0); main(sys.argv[2:])'
)
START_SECONDS = 60.0
# Extra time of a worker beyond the wall time of its program, on a loaded machine.
GRACE_SECONDS = 20.0
STOP_SECONDS = 3.0
# Attempts per program when its worker dies.
MAX_ATTEMPTS = 2


class SandboxJob(NamedTuple):
    """A program's text, what it reads on stdin, and tests of it: see `testing` for what counts as one."""

    text: str
    stdin: str = ''
    tests: str = ''
    limits: SandboxLimits | None = None


class ExecutionResult(NamedTuple):
    """Result of a program.

    | status | means |
    |---|---|
    | passed | all its tests did; without tests: exit code 0 |
    | failed | it ran, and not all of its tests passed |
    | error | it did not get that far, or crashed: exception, exit code, no test in the tests |
    | timeout, memory, output | it was stopped at that limit |
    | killed | it was stopped for filling its folder, or from outside |

    seconds: wall time. exit_code: negative for a signal, None if it was stopped. tests, tests_passed: of those given.
    stderr is the end of it; lines of the sandbox itself come last and begin with `sandbox: `.
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

    mechanisms: parts of the kernel in use. refused: those that are not, each with the reason. enforced, missing: names
    of guarantees.
    """

    mechanisms: tuple[str, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        unmet = f'; not enforced: {", ".join(self.missing)}' if self.missing else ''
        return f'sandbox by {", ".join(self.mechanisms) or "limits alone"}{unmet}'

    @property
    def enforced(self) -> tuple[str, ...]:
        """Guarantees that hold."""
        return (*ALWAYS_ENFORCED, *(name for name in GUARANTEES if name not in self.missing))

    @property
    def missing(self) -> tuple[str, ...]:
        """Guarantees that do not."""
        return tuple(
            name
            for name, alternatives in GUARANTEES.items()
            if not any(set(mechanisms) <= set(self.mechanisms) for mechanisms in alternatives)
        )


class SandboxWorker:
    """One worker's process, as its pool sees it."""

    def __init__(self, without: Sequence[str]):
        """Starts it; `wait` until it is ready."""
        self.connection, child_socket = socket.socketpair()
        root, settings = str(Path(maxlm.__file__).parent.parent), json.dumps({'without': list(without)})
        with child_socket:
            self.process = subprocess.Popen(
                [sys.executable, *INTERPRETER_OPTIONS, '-c', BOOTSTRAP, root, str(child_socket.fileno()), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
                env=ENVIRONMENT,
                cwd='/',
                start_new_session=True,
            )
        self.folder: str | None = None
        self.deadline = 0.0
        self.buffer = bytearray()

    def wait(self) -> Sandbox:
        """Waits until the worker is ready and returns its guarantees; RuntimeError if it cannot run programs."""
        self.connection.settimeout(START_SECONDS)
        try:
            _, hello = monitor.receive(self.connection)
        except (EOFError, OSError) as error:
            self.stop(immediately=True)
            raise RuntimeError(f'a worker of the sandbox did not start: {error}') from None
        self.folder = hello['folder']
        if 'failed' in hello:
            self.stop()
            raise RuntimeError(f'a worker of the sandbox did not start: {hello["failed"]}')
        return Sandbox(tuple(hello['has']), hello['refused'])

    def send(self, program: SandboxJob, limits: SandboxLimits) -> None:
        """Sends a program to the worker. OSError if it has died."""
        kind = monitor.TESTED if program.tests.strip() else monitor.PLAIN
        request = {**program._asdict(), 'limits': limits._asdict()}
        self.connection.settimeout(START_SECONDS)
        monitor.send(self.connection, kind, request)
        self.deadline = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        self.buffer.clear()

    def receive(self) -> ExecutionResult | None:
        """Reads a chunk of the response; returns the result once complete. EOFError, OSError if the worker has died."""
        chunk = self.connection.recv(1 << 20)
        if not chunk:
            raise EOFError('the worker has died')
        self.buffer += chunk
        size = monitor.HEADER.size
        if len(self.buffer) < size or len(self.buffer) < size + monitor.HEADER.unpack(self.buffer[:size])[1]:
            return None
        return ExecutionResult(**json.loads(self.buffer[size:]))

    def stop(self, *, immediately: bool = False) -> None:
        """Ends it with everything below it. By itself, as its socket is closed, unless there is a hurry."""
        self.connection.close()
        if not immediately:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.folder is not None:
            remove(self.folder)


class SandboxPool:
    """Workers that run programs side by side. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        workers: int,
        *,
        limits: SandboxLimits | None = None,
        required: Iterable[str] = REQUIRED,
        without: Iterable[str] = (),
    ):
        """Starts the workers.

        limits: of programs that bring none. required: guarantees without which it refuses to start. without: mechanisms
        not to use (for tests); `root`: workers give up root before anything else. InputError for wrong values, and if
        something required cannot be had here.
        """
        if workers < 1:
            raise InputError(f'a sandbox needs a worker or more, not {workers}')
        self.limits = (limits or SandboxLimits()).checked()
        self.without = check_names(without, MECHANISMS, 'mechanism')
        required_guarantees = check_names(required, (*ALWAYS_ENFORCED, *GUARANTEES), 'guarantee')
        self.lock = threading.Lock()
        self.workers: list[SandboxWorker] = []
        self.finalizer = weakref.finalize(self, stop_all, self.workers)
        try:
            for _ in range(workers):
                self.workers.append(SandboxWorker(self.without))
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
                f'this machine cannot enforce {", ".join(unmet)} for untrusted programs ({reasons}); it would '
                'with root, or with user namespaces, Landlock and seccomp for everybody'
            )

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers; programs that are running are stopped."""
        self.finalizer()

    def run(self, program: SandboxJob) -> ExecutionResult:
        """Runs one program."""
        return self.run_many([program])[0]

    def run_many(self, programs: Sequence[SandboxJob]) -> list[ExecutionResult]:
        """Runs programs, as many at a time as there are workers; returns results in the same order.

        Workers that die are replaced, and their program is tried once more before it is `killed`. InputError for limits
        that are none.
        """
        limits = [(program.limits or self.limits).checked() for program in programs]
        with self.lock:
            if not self.finalizer.alive:
                raise RuntimeError('the sandbox is closed')
            try:
                return self.run_all(programs, limits)
            except BaseException:
                # Late responses must not be mistaken for those of later programs.
                self.close()
                raise

    def run_all(self, programs: Sequence[SandboxJob], limits: Sequence[SandboxLimits]) -> list[ExecutionResult]:
        """`run_many` with each program's limits."""
        results: dict[int, ExecutionResult] = {}
        attempts = [0] * len(programs)
        queue, idle = deque(range(len(programs))), list(range(len(self.workers)))
        with selectors.DefaultSelector() as selector:
            while queue or selector.get_map():
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
                    if result is None:
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
        """A new worker for one that has died or does not answer."""
        self.workers[worker_index].stop(immediately=True)
        self.workers[worker_index] = SandboxWorker(self.without)
        self.workers[worker_index].wait()


def check_names(names: Iterable[str], all_names: Sequence[str], kind: str) -> tuple[str, ...]:
    """Returns the names; InputError for one that does not exist."""
    chosen = tuple(names)
    for name in chosen:
        if name not in all_names:
            raise InputError(f'{name!r} is no {kind} of the sandbox; there are: {", ".join(all_names)}')
    return chosen


def stop_all(workers: list[SandboxWorker]) -> None:
    """Ends workers side by side."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.connection.shutdown(socket.SHUT_RDWR)
    for worker in workers:
        worker.stop()
