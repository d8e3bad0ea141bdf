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
        verdicts = pool.run_many([Program('print(6 * 7)'), Program('def f(x): return x', tests='assert f(1) == 1')])

Tests run in another process than the program (see `far_objects`), so it cannot reach them, their outcome or what they
expect. All of it rests on the Linux kernel: whoever has a way into that
needs a machine of their own.
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

# What is promised, and the ways to it: all mechanisms of one of them.
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
ALWAYS = ('cpu', 'wall', 'memory', 'open files', 'file size', 'output', 'environment')
REQUIRED = ('files', 'network', 'signals')
SWITCHES = (
    *('root', 'mount namespace', 'network namespace', 'ipc namespace', 'process namespace', 'own user'),
    *('user namespace', 'landlock', 'seccomp', 'cgroup', 'memory watch'),
)
# No site packages, no user's folder, none of PYTHON… but one: sets are iterated in the same order in every worker.
INTERPRETER_OPTIONS = ('-s', '-S', '-P', '-B')
ENVIRONMENT = {'PYTHONHASHSEED': '0', 'LANG': 'C.UTF-8'}
BOOT = (
    'import sys; sys.path.insert(0, sys.argv[1]); from maxlm.sandbox.worker import main; '
    'sys.path.pop(0); main(sys.argv[2:])'
)
START_SECONDS = 60.0
# How much longer than its program's wall time a worker may take, on a machine that has much else to do.
GRACE_SECONDS = 20.0
STOP_SECONDS = 3.0
# A worker that dies again and again over one program is not the program's fault alone.
TRIES = 2


class SandboxJob(NamedTuple):
    """A program's text, what it reads on stdin, and tests of it: see `testing` for what counts as one."""

    text: str
    stdin: str = ''
    tests: str = ''
    limits: SandboxLimits | None = None


class ExecutionResult(NamedTuple):
    """How a program ended.

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
    """What holds on this machine.

    mechanisms: parts of the kernel in use. refused: those that are not, each with the reason. enforced, missing: names
    of guarantees.
    """

    mechanisms: tuple[str, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lacking = f'; not enforced: {", ".join(self.missing)}' if self.missing else ''
        return f'sandbox by {", ".join(self.mechanisms) or "limits alone"}{lacking}'

    @property
    def enforced(self) -> tuple[str, ...]:
        """Guarantees that hold."""
        return (*ALWAYS, *(name for name in GUARANTEES if name not in self.missing))

    @property
    def missing(self) -> tuple[str, ...]:
        """Guarantees that do not."""
        return tuple(
            name for name, ways in GUARANTEES.items() if not any(set(way) <= set(self.mechanisms) for way in ways)
        )


class SandboxWorker:
    """One worker's process, as its pool sees it."""

    def __init__(self, without: Sequence[str]):
        """Starts it; `wait` until it is ready."""
        self.connection, theirs = socket.socketpair()
        root, settings = str(Path(maxlm.__file__).parent.parent), json.dumps({'without': list(without)})
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *INTERPRETER_OPTIONS, '-c', BOOT, root, str(theirs.fileno()), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                cwd='/',
                start_new_session=True,
            )
        self.folder: str | None = None
        self.deadline = 0.0
        self.answer = bytearray()

    def wait(self) -> Sandbox:
        """What holds in it, once it is ready; RuntimeError if it cannot run programs."""
        self.connection.settimeout(START_SECONDS)
        try:
            _, hello = monitor.receive(self.connection)
        except (EOFError, OSError) as error:
            self.stop(at_once=True)
            raise RuntimeError(f'a worker of the sandbox did not start: {error}') from None
        self.folder = hello['folder']
        if 'failed' in hello:
            self.stop()
            raise RuntimeError(f'a worker of the sandbox did not start: {hello["failed"]}')
        return Sandbox(tuple(hello['has']), hello['refused'])

    def give(self, program: SandboxJob, limits: SandboxLimits) -> None:
        """Hands it a program. OSError if it has died."""
        kind = monitor.TESTED if program.tests.strip() else monitor.PLAIN
        request = {**program._asdict(), 'limits': limits._asdict()}
        self.connection.settimeout(START_SECONDS)
        monitor.send(self.connection, kind, request)
        self.deadline = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        self.answer.clear()

    def take(self) -> ExecutionResult | None:
        """Reads a part of the answer; the verdict once it is whole. EOFError, OSError if the worker has died."""
        part = self.connection.recv(1 << 20)
        if not part:
            raise EOFError('the worker has died')
        self.answer += part
        size = monitor.HEADER.size
        if len(self.answer) < size or len(self.answer) < size + monitor.HEADER.unpack(self.answer[:size])[1]:
            return None
        return ExecutionResult(**json.loads(self.answer[size:]))

    def stop(self, *, at_once: bool = False) -> None:
        """Ends it with everything below it. By itself, as its socket is closed, unless there is a hurry."""
        self.connection.close()
        if not at_once:
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
        self.without = known(without, SWITCHES, 'mechanism')
        needed = known(required, (*ALWAYS, *GUARANTEES), 'guarantee')
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
        lacking = [name for name in needed if name in self.sandbox.missing]
        if lacking:
            self.close()
            reasons = '; '.join(f'{name}: {reason}' for name, reason in self.sandbox.refused.items())
            raise InputError(
                f'this machine cannot enforce {", ".join(lacking)} for untrusted programs ({reasons}); it would '
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
        """Runs programs, as many at a time as there are workers; their verdicts in the same order.

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
                # Answers to programs that nobody waits for any more must not be taken for those of others.
                self.close()
                raise

    def run_all(self, programs: Sequence[SandboxJob], limits: Sequence[SandboxLimits]) -> list[ExecutionResult]:
        """`run_many` with each program's limits."""
        verdicts: dict[int, ExecutionResult] = {}
        tries = [0] * len(programs)
        waiting, idle = deque(range(len(programs))), list(range(len(self.workers)))
        with selectors.DefaultSelector() as selector:
            while waiting or selector.get_map():
                while waiting and idle:
                    place, index = idle.pop(), waiting.popleft()
                    tries[index] += 1
                    with contextlib.suppress(OSError):
                        self.workers[place].give(programs[index], limits[index])
                    selector.register(self.workers[place].connection, selectors.EVENT_READ, (place, index))
                ready = {key.data for key, _ in selector.select(timeout=1.0)}
                for key in list(selector.get_map().values()):
                    place, index = key.data
                    worker = self.workers[place]
                    verdict = None
                    try:
                        verdict = worker.take() if key.data in ready else None
                        if verdict is None and time.monotonic() < worker.deadline:
                            continue
                    except (EOFError, OSError):
                        pass
                    selector.unregister(key.fileobj)
                    idle.append(place)
                    if verdict is None:
                        self.replace(place)
                        if tries[index] < TRIES:
                            waiting.appendleft(index)
                            continue
                        verdict = ExecutionResult(
                            'killed', '', 'sandbox: the worker died\n', limits[index].wall_seconds, None
                        )
                    verdicts[index] = verdict
        return [verdicts[index] for index in range(len(programs))]

    def replace(self, place: int) -> None:
        """A new worker for one that has died or does not answer."""
        self.workers[place].stop(at_once=True)
        self.workers[place] = SandboxWorker(self.without)
        self.workers[place].wait()


def known(names: Iterable[str], all_names: Sequence[str], kind: str) -> tuple[str, ...]:
    """The names; InputError for one that does not exist."""
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
