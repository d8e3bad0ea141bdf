"""Runs a command on a terminal that a test closes: `python -m tests.lost_terminal TERMINAL CODE NAME ARGUMENTS…`.

This process behaves like a shell: it leads the session of the terminal and sends SIGHUP to the command's process group
when the terminal is closed. It writes the exit code of the command to the file CODE. The command is forked, which saves
the seconds of importing JAX. Training waits before each batch, so that the run lasts as long as a test needs.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from maxlm.cli.process import run
from maxlm.cli.runs import train  # noqa: F401 - imported before the fork
from tests.slow_batches import slow_down_batches

# Seconds for a command to start or to end on a machine with other load.
PATIENCE = 240.0


class Terminal:
    """A terminal with a running command. `close` hangs up."""

    def __init__(self, code: Path):
        self._code = code
        self.master, self.slave = pty.openpty()
        self.text = ''

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Reads the output until a condition is true."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.text
            assert not self._code.exists(), self.text
            if select.select([self.master], [], [], 0.05)[0]:
                self.text += os.read(self.master, 65536).decode(errors='replace')

    def close(self) -> int:
        """Closes the terminal, waits for the command and returns its exit code."""
        os.close(self.master)
        end = time.monotonic() + PATIENCE
        while not self._code.exists():
            assert time.monotonic() < end, self.text
            time.sleep(0.02)
        return int(self._code.read_text())


@contextlib.contextmanager
def on_terminal(folder: Path, name: str, arguments: Sequence[object], *, ignored: bool = False) -> Iterator[Terminal]:
    """Runs a command with arguments on a new terminal.

    Args:
        folder: directory for the output of the command.
        name: name of the command.
        arguments: arguments of the command.
        ignored: SIGHUP is ignored, as under `nohup`.
    """
    # The test process is not forked here.
    from tests.forking import forking

    code = folder / f'{name}-code'
    code.unlink(missing_ok=True)
    terminal = Terminal(code)
    with forking('tests.lost_terminal', devices=8) as parent:
        words = [os.ttyname(terminal.slave), code, 'ignored' if ignored else 'default', name, *arguments]
        process = parent.start(words, folder / f'{name}.log')
        terminal.wait_for(lambda: process.poll() is not None or (code.parent / f'{code.name}-started').exists())
        # While a process has it open, the terminal is not closed.
        os.close(terminal.slave)
        yield terminal


def main(path: str, code: Path, action: str, name: str, arguments: list[str]) -> None:
    """Runs the command as a shell does."""
    os.setsid()
    # The first terminal that the leader of a session opens becomes its controlling terminal.
    descriptor = os.open(path, os.O_RDWR)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if action == 'ignored' else signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        for target in (0, 1, 2):
            os.dup2(descriptor, target)
        os.close(descriptor)
        _run(name, arguments)

    def hang_up(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # A shell sends it, and the kernel sends it again after the exit of the shell.
        os.killpg(0, signal.SIGHUP)
        os.killpg(0, signal.SIGHUP)

    if action != 'ignored':
        signal.signal(signal.SIGHUP, hang_up)
    code.with_name(f'{code.name}-started').touch()
    _, status = os.waitpid(pid, 0)
    draft = code.with_suffix('.new')
    draft.write_text(str(os.waitstatus_to_exitcode(status)))
    draft.rename(code)


def _run(name: str, arguments: list[str]) -> None:
    # Streams of a new process: the forked ones were made before stdout was a terminal. They stay open until its end.
    sys.stdout = sys.__stdout__ = open(1, 'w', buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, 'w', buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [f'maxlm {name}', *arguments]
    slow_down_batches()
    code = 1
    try:
        run(name)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        # The interpreter ends with 120 if this fails.
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)


if __name__ == '__main__':
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
