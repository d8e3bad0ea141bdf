"""Monitors one program from start to result, in a separate process that never executes any of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from typing import Any, NoReturn

from maxlm.sandbox import cgroup, fork
from maxlm.sandbox.files import exceeds_limits, remove
from maxlm.sandbox.isolation import PROCESS_NAMESPACE, Confinement, drop_to_user
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.process.interpreter import receive, send
from maxlm.sandbox.process_tree import ProcessTree, reap

# Kinds of messages between a pool and its worker: requests with tests, and others.
PLAIN, TESTED = b'P', b'T'
WATCH_SECONDS = 0.05
# Time for the tests to report and for pipes to close after the program was stopped.
GRACE_SECONDS = 0.5
# A longer pause means that the monitor itself was suspended. The deadline is then extended by the pause.
SUSPENDED_SECONDS = 1.0
CHUNK = 1 << 16
MAX_STDERR_BYTES = 8 << 10
MAX_NOTES = 20
# Tolerance, because the kernel charges CPU time in ticks.
CPU_SLACK = 0.2


class ProcessMonitor:
    """Starts, watches and stops the processes of one program."""

    def __init__(self, confinement: Confinement, tree: ProcessTree | None, cgroup_parent: int | None, has_tests: bool):
        """Starts the processes, which wait for commands.

        Args:
            confinement: isolation of the worker.
            tree: process tree, or None if it cannot be read.
            cgroup_parent: descriptor of the parent control group, or None.
            has_tests: also start a process for tests.
        """
        self.confinement, self.tree = confinement, tree
        self.group = (
            cgroup.Group(cgroup_parent, f'maxlm-{os.getpid()}-{os.urandom(4).hex()}')
            if cgroup_parent is not None
            else None
        )
        users = confinement.users
        self.folder = self.make_folder('program', users.program if users else -1)
        self.tests_folder = self.make_folder('tests', users.tests if users else -1) if has_tests else None
        null = os.open(os.devnull, os.O_RDWR)
        program_socket, tests_socket = socket.socketpair() if has_tests else (None, None)
        self.tests_command = self.report = -1
        self.tests_pid = 0
        child_descriptors = []
        if tests_socket is not None:
            command, self.tests_command = os.pipe()
            self.report, report = os.pipe()
            child_descriptors += [command, report]
            files = [null, null, null, tests_socket.fileno(), command, report]
            self.tests_pid = fork.fork(lambda: fork.tests_process(confinement, files))
            self.tests_pidfd = os.pidfd_open(self.tests_pid)
        cgroup_procs = self.group.open_procs() if self.group else null
        (stdin, self.stdin), (self.stdout, stdout), (self.stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        (command, self.command), (self.status, status) = os.pipe(), os.pipe()
        channel = program_socket.fileno() if program_socket is not None else null
        descriptors = [stdin, stdout, stderr, channel, command, status, cgroup_procs]
        confinement.unshare_program_pids()
        # A pidfd, because the process id can be reused as soon as the process has been reaped.
        self.init_pidfd = os.pidfd_open(fork.fork(lambda: fork.init_process(confinement, descriptors)))
        for descriptor in {stdin, stdout, stderr, command, status, cgroup_procs, null, *child_descriptors}:
            os.close(descriptor)
        for side in (program_socket, tests_socket):
            if side is not None:
                side.close()
        self.buffers: dict[int, bytearray] = {
            descriptor: bytearray()
            for descriptor in (self.stdout, self.stderr, self.status, self.report)
            if descriptor >= 0
        }
        self.stop_reason = ''

    def make_folder(self, name: str, user: int) -> str | None:
        """Creates a directory for a process. Returns None with a mount namespace, which needs none."""
        if self.confinement.folder is None:
            return None
        folder = f'{self.confinement.folder}/{name}'
        os.mkdir(folder, 0o700)
        os.chown(folder, user, -1)
        return folder

    def run(self, request: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        """Sends the commands, watches the processes until they end, and returns the result."""
        limits = SandboxLimits(**request['limits'])
        if self.group:
            self.group.limit(limits)
        start = time.monotonic()
        has_tests, command = bool(self.tests_pid), {'limits': request['limits']}
        write_command(self.command, {**command, 'folder': self.folder, 'text': request['text'], 'tested': has_tests})
        if has_tests:
            write_command(self.tests_command, {**command, 'folder': self.tests_folder, 'tests': request['tests']})
        self.watch(limits, request['stdin'].encode(errors='surrogatepass'), connection, start)
        seconds = time.monotonic() - start
        self.kill()
        result = self.result(limits, seconds)
        self.clean_up()
        return result

    def watch(self, limits: SandboxLimits, stdin: bytes, connection: socket.socket, start: float) -> None:
        """Transfers input and output until all streams have ended or a limit is exceeded."""
        poll = select.poll()
        waiting = set(self.buffers)
        for descriptor in (*waiting, self.stdin):
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLOUT if descriptor == self.stdin else select.POLLIN)
        poll.register(connection, getattr(select, 'POLLRDHUP', select.POLLHUP))
        deadline, last_check, last_poll = start + limits.wall_seconds, start, start
        remaining = memoryview(stdin)
        while waiting:
            now = time.monotonic()
            if now - last_poll > SUSPENDED_SECONDS:
                deadline += now - last_poll
            last_poll = now
            if now >= deadline:
                if self.stop_reason:
                    return
                self.stop('timeout')
            if self.stop_reason:
                deadline = min(deadline, now + GRACE_SECONDS) if deadline > now else now + GRACE_SECONDS
            if now - last_check >= WATCH_SECONDS and not self.stop_reason:
                last_check = now
                self.check_usage(limits)
            for descriptor, event in poll.poll(1000 * max(0.0, min(WATCH_SECONDS, deadline - time.monotonic()))):
                if descriptor == connection.fileno():
                    self.kill()
                    os._exit(0)
                if descriptor == self.stdin:
                    remaining = self.write_stdin(remaining, event)
                    if not remaining:
                        poll.unregister(self.stdin)
                        os.close(self.stdin)
                elif not self.read_output(descriptor, limits):
                    poll.unregister(descriptor)
                    waiting.discard(descriptor)
                    # Tests or program have ended. Leftover processes may keep the streams open.
                    if descriptor in (self.report, self.status):
                        self.kill()

    def write_stdin(self, remaining: memoryview, event: int) -> memoryview:
        """Writes to the program's stdin and returns the remaining bytes."""
        if event & (select.POLLERR | select.POLLHUP):
            return memoryview(b'')
        try:
            return remaining[os.write(self.stdin, remaining[:CHUNK]) :] if remaining else remaining
        except BlockingIOError:
            return remaining
        except OSError:
            return memoryview(b'')

    def read_output(self, descriptor: int, limits: SandboxLimits) -> bool:
        """Reads a chunk. Returns False at the end of the stream."""
        try:
            chunk = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return True
        remaining = limits.output_bytes - len(self.buffers[self.stdout]) - len(self.buffers[self.stderr])
        if descriptor not in (self.stdout, self.stderr):
            self.buffers[descriptor] += chunk
        else:
            self.buffers[descriptor] += chunk[: max(0, remaining)]
            if len(chunk) > remaining:
                self.stop('output')
        return bool(chunk)

    def check_usage(self, limits: SandboxLimits) -> None:
        """Stops a program that uses too much memory, or too much disk without a mount namespace."""
        if self.tree is not None and self.tree.memory(limits.memory_bytes) > limits.memory_bytes:
            self.stop('memory')
        if self.folder is not None and exceeds_limits(self.folder, limits):
            self.stop('disk')

    def stop(self, reason: str) -> None:
        """Stops the program. Keeps the first reason."""
        if not self.stop_reason:
            self.stop_reason = reason
            self.kill()

    def kill(self) -> None:
        """Kills all processes of the program."""
        if self.group:
            if not self.stop_reason and self.group.out_of_memory():
                self.stop_reason = 'memory'
            self.group.kill()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init_pidfd, signal.SIGKILL)
        if PROCESS_NAMESPACE not in self.confinement.enabled:
            if self.confinement.users:
                user = self.confinement.users.program
                os.waitpid(fork.fork(lambda: kill_user(user)), 0)
            if self.tree is not None:
                self.tree.kill_all(exclude=str(self.tests_pid))

    def clean_up(self) -> None:
        """Removes all processes and files of the program and its tests."""
        if self.tests_pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.tests_pidfd, signal.SIGKILL)
        if PROCESS_NAMESPACE not in self.confinement.enabled and self.tree is not None:
            self.tree.kill_all()
        deadline = time.monotonic() + GRACE_SECONDS
        while reap() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.group:
            self.group.remove()
        for folder in (self.folder, self.tests_folder):
            if folder is not None:
                remove(folder)

    def result(self, limits: SandboxLimits, seconds: float) -> dict[str, Any]:
        """Returns the result. All processes must have ended."""
        status = self.buffers[self.status]
        exit_info: dict[str, Any] = json.loads(bytes(status)) if status else {'code': None, 'cpu': 0.0}
        stdout, stderr = (
            bytes(self.buffers[descriptor]).decode(errors='replace') for descriptor in (self.stdout, self.stderr)
        )
        total, passed, notes, has_error = parse_report(bytes(self.buffers.get(self.report, b'')))
        code = exit_info['code']
        if self.stop_reason:
            result = {'disk': 'killed'}.get(self.stop_reason, self.stop_reason)
            notes.append(f'stopped: {self.stop_reason} limit')
        elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and exit_info['cpu'] > limits.cpu_seconds - CPU_SLACK):
            result = 'timeout'
            notes.append(f'stopped: {limits.cpu_seconds:g} s of CPU time')
        elif code == -signal.SIGKILL:
            result = 'killed'
        elif self.tests_pid and total and passed == total and not has_error:
            result = 'passed'
        elif code is None and not self.tests_pid:
            result = 'killed'
        elif code not in (0, None):
            result = 'memory' if stderr.rstrip().rpartition('\n')[2].startswith('MemoryError') else 'error'
        elif self.tests_pid:
            result = 'error' if has_error or not total else 'failed'
        else:
            result = 'passed'
        if self.tests_pid and not total and not has_error:
            notes.append('the tests contain no test')
        if code == fork.EXIT_NOT_ISOLATED:
            notes.append('the program may not have been started')
        note_lines = ''.join(f'sandbox: {note}\n' for note in notes[:MAX_NOTES])
        return {
            **{
                'status': result,
                'stdout': stdout,
                'stderr': stderr[-MAX_STDERR_BYTES:] + note_lines,
                'seconds': seconds,
            },
            **{'exit_code': code, 'tests': total, 'tests_passed': passed},
        }


def kill_user(user: int) -> None:
    """Kills every process of a user, including this one."""
    drop_to_user(user)
    os.kill(-1, signal.SIGKILL)


def write_command(descriptor: int, command: dict[str, Any]) -> None:
    """Writes a command and closes the pipe. Ignores a process that has exited, which `watch` detects."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, 'wb') as pipe:
        pipe.write(json.dumps(command).encode())


def parse_report(report: bytes) -> tuple[int, int, list[str], bool]:
    """Returns the number of tests, the number of passed tests, notes, and True if code outside the tests failed."""
    total = counted = passed = 0
    notes, has_error = [], False
    for line in report.splitlines(keepends=True):
        # An incomplete line: the tests' process was killed while writing.
        if not line.endswith(b'\n'):
            continue
        kind, *rest = json.loads(line)
        if kind == 'total':
            total = rest[0]
            continue
        counted += kind != 'error'
        passed += kind == 'pass'
        has_error = has_error or kind == 'error'
        notes += rest
    return max(total, counted), passed, notes, has_error


def monitor_next(
    connection: socket.socket, confinement: Confinement, tree: ProcessTree | None, cgroup_parent: int | None
) -> NoReturn:
    """Waits for one request and handles it. Forks the program's processes before it reads the request."""
    has_tests = connection.recv(1, socket.MSG_PEEK) == TESTED
    process_monitor = ProcessMonitor(confinement, tree, cgroup_parent, has_tests)
    _, request = receive(connection)
    send(connection, PLAIN, json.dumps(process_monitor.run(json.loads(request), connection)).encode())
    os._exit(0)
