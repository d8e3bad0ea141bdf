"""One program from its arrival to its verdict: a process of its own, which watches, stops, and never runs any of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import time
from typing import Any, NoReturn

from maxlm.sandbox import cgroup, fork
from maxlm.sandbox.files import holds_too_much, remove
from maxlm.sandbox.isolation import PROCESS_NAMESPACE, Confinement, drop_to_user
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.process_tree import ProcessTree, reap

# A message between a pool and its worker: whether tests are in it, its length, JSON.
HEADER = struct.Struct('>cI')
PLAIN, TESTED = b'P', b'T'
WATCH_SECONDS = 0.05
# For the tests to say which of them can pass no more, and for pipes to end, once the program has been stopped.
GRACE_SECONDS = 0.5
# A judge that was away for so long has been stopped itself, with the machine or by a debugger, and adds that time.
AWAY_SECONDS = 1.0
CHUNK = 1 << 16
KEPT_OF_STDERR = 8 << 10
MOST_NOTES = 20
# CPU time is charged in ticks.
CPU_SLACK = 0.2


class ProcessMonitor:
    """The processes of one program, seen from outside."""

    def __init__(self, confinement: Confinement, tree: ProcessTree | None, groups: int | None, tested: bool):
        """Starts the processes, which wait for orders. groups: a folder of cgroups. tested: there will be tests."""
        self.confinement, self.tree = confinement, tree
        self.group = cgroup.Group(groups, f'maxlm-{os.getpid()}-{os.urandom(4).hex()}') if groups is not None else None
        users = confinement.users
        self.folder = self.make_folder('program', users.program if users else -1)
        self.tests_folder = self.make_folder('tests', users.tests if users else -1) if tested else None
        null = os.open(os.devnull, os.O_RDWR)
        near, far = socket.socketpair() if tested else (None, None)
        self.tests_order = self.report = -1
        self.tester = 0
        theirs = []
        if far is not None:
            order, self.tests_order = os.pipe()
            self.report, report = os.pipe()
            theirs += [order, report]
            files = [null, null, null, far.fileno(), order, report]
            self.tester = fork.fork(lambda: fork.tests_process(confinement, files))
            self.tester_handle = os.pidfd_open(self.tester)
        entrance = self.group.entrance() if self.group else null
        (stdin, self.stdin), (self.stdout, stdout), (self.stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        (order, self.order), (self.status, status) = os.pipe(), os.pipe()
        talk = near.fileno() if near is not None else null
        places = [stdin, stdout, stderr, talk, order, status, entrance]
        confinement.number_the_program()
        # Not by its number, which is another's as soon as it has been reaped.
        self.first_handle = os.pidfd_open(fork.fork(lambda: fork.first_process(confinement, places)))
        for descriptor in {stdin, stdout, stderr, order, status, entrance, null, *theirs}:
            os.close(descriptor)
        for end in (near, far):
            if end is not None:
                end.close()
        self.read: dict[int, bytearray] = {
            descriptor: bytearray()
            for descriptor in (self.stdout, self.stderr, self.status, self.report)
            if descriptor >= 0
        }
        self.cause = ''

    def make_folder(self, name: str, user: int) -> str | None:
        """A folder for a process where it cannot have one that ends with it."""
        if self.confinement.folder is None:
            return None
        folder = f'{self.confinement.folder}/{name}'
        os.mkdir(folder, 0o700)
        os.chown(folder, user, -1)
        return folder

    def run(self, request: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        """Gives the orders, watches until the end, and says how it went."""
        limits = SandboxLimits(**request['limits'])
        if self.group:
            self.group.limit(limits)
        began = time.monotonic()
        tested, order = bool(self.tester), {'limits': request['limits']}
        write_files(self.order, {**order, 'folder': self.folder, 'text': request['text'], 'tested': tested})
        if tested:
            write_files(self.tests_order, {**order, 'folder': self.tests_folder, 'tests': request['tests']})
        self.watch(limits, request['stdin'].encode(errors='surrogatepass'), connection, began)
        seconds = time.monotonic() - began
        self.kill()
        verdict = self.verdict(limits, seconds)
        self.clean_up()
        return verdict

    def watch(self, limits: SandboxLimits, stdin: bytes, connection: socket.socket, began: float) -> None:
        """Moves what the processes read and write until all has ended or a limit has been passed."""
        poll = select.poll()
        waiting = set(self.read)
        for descriptor in (*waiting, self.stdin):
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLOUT if descriptor == self.stdin else select.POLLIN)
        poll.register(connection, getattr(select, 'POLLRDHUP', select.POLLHUP))
        deadline, looked, last = began + limits.wall_seconds, began, began
        left = memoryview(stdin)
        while waiting:
            now = time.monotonic()
            if now - last > AWAY_SECONDS:
                deadline += now - last
            last = now
            if now >= deadline:
                if self.cause:
                    return
                self.stop('timeout')
            if self.cause:
                deadline = min(deadline, now + GRACE_SECONDS) if deadline > now else now + GRACE_SECONDS
            if now - looked >= WATCH_SECONDS and not self.cause:
                looked = now
                self.look(limits)
            for descriptor, event in poll.poll(1000 * max(0.0, min(WATCH_SECONDS, deadline - time.monotonic()))):
                if descriptor == connection.fileno():
                    self.kill()
                    os._exit(0)
                if descriptor == self.stdin:
                    left = self.feed(left, event)
                    if not left:
                        poll.unregister(self.stdin)
                        os.close(self.stdin)
                elif not self.take(descriptor, limits):
                    poll.unregister(descriptor)
                    waiting.discard(descriptor)
                    # The tests are done, or the program is: what it has left behind may hold its streams open.
                    if descriptor in (self.report, self.status):
                        self.kill()

    def feed(self, left: memoryview, event: int) -> memoryview:
        """Writes to the program's stdin; what is left of it."""
        if event & (select.POLLERR | select.POLLHUP):
            return memoryview(b'')
        try:
            return left[os.write(self.stdin, left[:CHUNK]) :] if left else left
        except BlockingIOError:
            return left
        except OSError:
            return memoryview(b'')

    def take(self, descriptor: int, limits: SandboxLimits) -> bool:
        """Reads a part; False at the end."""
        try:
            part = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return True
        room = limits.output_bytes - len(self.read[self.stdout]) - len(self.read[self.stderr])
        if descriptor not in (self.stdout, self.stderr):
            self.read[descriptor] += part
        else:
            self.read[descriptor] += part[: max(0, room)]
            if len(part) > room:
                self.stop('output')
        return bool(part)

    def look(self, limits: SandboxLimits) -> None:
        """Stops what holds too much memory or, where nothing else limits it, disk."""
        if self.tree is not None and self.tree.memory(limits.memory_bytes) > limits.memory_bytes:
            self.stop('memory')
        if self.folder is not None and holds_too_much(self.folder, limits):
            self.stop('disk')

    def stop(self, cause: str) -> None:
        """Ends the program for that cause, the first one if there are several."""
        if not self.cause:
            self.cause = cause
            self.kill()

    def kill(self) -> None:
        """Ends all processes of the program."""
        if self.group:
            if not self.cause and self.group.out_of_memory():
                self.cause = 'memory'
            self.group.kill()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.first_handle, signal.SIGKILL)
        if PROCESS_NAMESPACE not in self.confinement.has:
            if self.confinement.users:
                user = self.confinement.users.program
                os.waitpid(fork.fork(lambda: kill_tree(user)), 0)
            if self.tree is not None:
                self.tree.sweep(spare=str(self.tester))

    def clean_up(self) -> None:
        """Nothing is left of the program or its tests."""
        if self.tester:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.tester_handle, signal.SIGKILL)
        if PROCESS_NAMESPACE not in self.confinement.has and self.tree is not None:
            self.tree.sweep()
        deadline = time.monotonic() + GRACE_SECONDS
        while reap() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.group:
            self.group.remove()
        for folder in (self.folder, self.tests_folder):
            if folder is not None:
                remove(folder)

    def verdict(self, limits: SandboxLimits, seconds: float) -> dict[str, Any]:
        """What is known once all has ended."""
        status = self.read[self.status]
        facts: dict[str, Any] = json.loads(bytes(status)) if status else {'code': None, 'cpu': 0.0}
        stdout, stderr = (bytes(self.read[place]).decode(errors='replace') for place in (self.stdout, self.stderr))
        total, passed, notes, broken = usage(bytes(self.read.get(self.report, b'')))
        code = facts['code']
        if self.cause:
            result = {'disk': 'killed'}.get(self.cause, self.cause)
            notes.append(f'stopped: {self.cause} limit')
        elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and facts['cpu'] > limits.cpu_seconds - CPU_SLACK):
            result = 'timeout'
            notes.append(f'stopped: {limits.cpu_seconds:g} s of CPU time')
        elif code == -signal.SIGKILL:
            result = 'killed'
        elif self.tester and total and passed == total and not broken:
            result = 'passed'
        elif code is None and not self.tester:
            result = 'killed'
        elif code not in (0, None):
            result = 'memory' if stderr.rstrip().rpartition('\n')[2].startswith('MemoryError') else 'error'
        elif self.tester:
            result = 'error' if broken or not total else 'failed'
        else:
            result = 'passed'
        if self.tester and not total and not broken:
            notes.append('there is no test in the tests')
        if code == fork.EXIT_NOT_CONFINED:
            notes.append('the program may not have been started')
        said = ''.join(f'sandbox: {note}\n' for note in notes[:MOST_NOTES])
        return {
            **{'status': result, 'stdout': stdout, 'stderr': stderr[-KEPT_OF_STDERR:] + said, 'seconds': seconds},
            **{'exit_code': code, 'tests': total, 'tests_passed': passed},
        }


def kill_tree(user: int) -> None:
    """Ends every process of a user, of which this one becomes the last."""
    drop_to_user(user)
    os.kill(-1, signal.SIGKILL)


def write_files(descriptor: int, order: dict[str, Any]) -> None:
    """Writes an order and closes the pipe; a process that has gone is noticed elsewhere."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, 'wb') as pipe:
        pipe.write(json.dumps(order).encode())


def usage(report: bytes) -> tuple[int, int, list[str], bool]:
    """Tests, those passed, reasons of the others, whether something went wrong before or between tests."""
    total = counted = passed = 0
    notes, broken = [], False
    for line in report.splitlines(keepends=True):
        # The tests' process was stopped while it wrote.
        if not line.endswith(b'\n'):
            continue
        kind, *rest = json.loads(line)
        if kind == 'total':
            total = rest[0]
            continue
        counted += kind != 'error'
        passed += kind == 'pass'
        broken = broken or kind == 'error'
        notes += rest
    return max(total, counted), passed, notes, broken


def judge_next(
    connection: socket.socket, confinement: Confinement, tree: ProcessTree | None, groups: int | None
) -> NoReturn:
    """Reads one request, only after the program's processes have been forked, and answers it."""
    tested = connection.recv(1, socket.MSG_PEEK) == TESTED
    judge = ProcessMonitor(confinement, tree, groups, tested)
    _, request = receive(connection)
    send(connection, PLAIN, judge.run(request, connection))
    os._exit(0)


def send(connection: socket.socket, kind: bytes, message: dict[str, Any]) -> None:
    """One message."""
    data = json.dumps(message).encode()
    connection.sendall(HEADER.pack(kind, len(data)) + data)


def receive(connection: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """One message; EOFError if the other end is closed."""

    def exactly(length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = connection.recv(min(length - len(data), 1 << 20))
            if not part:
                raise EOFError('the other end is closed')
            data += part
        return bytes(data)

    kind, length = HEADER.unpack(exactly(HEADER.size))
    return kind, json.loads(exactly(length))
