"""Errors and exit codes of commands: one line for the user, an exit code for scripts."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator

EXIT_DONE = 0
# The run itself failed, e.g. its loss is not finite.
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
# A device of this host computes wrong results. Nothing that it computed wrongly was saved.
EXIT_DEVICE = 74
# EX_TEMPFAIL of sysexits.h: the run was stopped and its state is saved. A restart resumes it.
EXIT_PREEMPTED = 75
# Exit codes that a shell reports for a program that SIGINT or SIGPIPE ended.
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
# Maximum number of characters of an error message.
_MAX_MESSAGE = 4000

# Errors of paths, which do not disappear when the command is repeated.
_PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EISDIR, errno.ENOTDIR)


def escape_controls(text: str) -> str:
    """Escapes characters that control a terminal, except newlines and tabs, and those that are not printable."""
    if text.isprintable():
        return text
    return ''.join(c if c.isprintable() or c in '\n\t' else c.encode('unicode_escape').decode() for c in text)


def one_line(text: object) -> str:
    """Returns a text as one line. Names and values from files may contain newlines and escape sequences."""
    return escape_controls(' '.join(str(text).split()))


class InputError(Exception):
    """Invalid user input.

    The message is one line that names the invalid file, key or value and how to fix it. Commands print it without a
    traceback and exit with code 2. Code that raises it leaves no partial output.
    """

    def __init__(self, message: object = ''):
        super().__init__(one_line(message))


class DeviceError(Exception):
    """A device computes wrong results, so the run ends without saving its state.

    Commands print the message in one line. A process at fault exits with code 74, and then another host must replace
    its host. All other processes exit with 75, because they can resume.

    Attributes:
        processes: indices of the processes whose devices are at fault; () if that is not known.
    """

    def __init__(self, message: object, processes: tuple[int, ...] = ()):
        super().__init__(one_line(message))
        self.processes = processes

    def code_of(self, process: int, num_processes: int) -> int:
        """Returns the exit code of a process. The device of a single process is at fault in any case."""
        return EXIT_DEVICE if num_processes == 1 or process in self.processes else EXIT_PREEMPTED


class TerminatedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received; see `maxlm.runtime.termination.exit_on_termination`.

    Code that re-raises KeyboardInterrupt also re-raises this.
    """


def flag(name: str) -> str:
    """Returns the option for a name of an argparse.Namespace: `max_files` → `--max-files`."""
    return f'--{name.replace("_", "-")}'


def surrogate_in(text: str) -> int:
    """Returns the index of the first surrogate in `text`, which is invalid in Unicode text; -1 if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1


def nearest(name: str, options: Iterable[str]) -> str:
    """Returns the end of an error message: the closest option, or all options if none is close."""
    import difflib  # only needed for errors

    options = list(options)
    closest = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if closest:
        return f'did you mean {closest[0]!r}?'
    return f'available: {", ".join(options)}' if options else 'none available'


def os_message(error: OSError) -> str:
    """Returns the reason of an OSError, e.g. `Permission denied`, without its number and path."""
    return error.strerror or str(error)


@contextlib.contextmanager
def explain_os_errors(path: object, advice: str) -> Iterator[None]:
    """Context that raises an InputError for an OSError: `PATH: REASON; ADVICE`."""
    try:
        yield
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; {advice}') from error


@contextlib.contextmanager
def name_errors(source: object) -> Iterator[None]:
    """Context that puts the file, key or option that is at fault before the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f'{source}: {error}') from error


def exit_code(command: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Runs `command(argv)` and returns its exit code. An InputError becomes one line on stderr and exit code 2.

    So does an OSError about a path that cannot be opened, such as a name in a file that is too long.
    """
    try:
        code = command(argv) or EXIT_DONE
        sys.stdout.flush()
        return code
    except InputError as error:
        line = str(error)
        # A message can contain names from a file, which may have any length.
        line = line if len(line) <= _MAX_MESSAGE else f'{line[:_MAX_MESSAGE]}…'
        print(f'error: {line}', file=sys.stderr)
        return EXIT_BAD_INPUT
    except DeviceError as error:
        # With several processes, `Heartbeats` ends them.
        print(f'error: {error}', file=sys.stderr)
        return EXIT_DEVICE
    except TerminatedError as error:
        print(error, file=sys.stderr)
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        # The reader has exited, as in `maxlm configs | head`. Python flushes stdout again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.filename is None or error.errno not in _PATH_ERRORS:
            raise
        print(one_line(f'error: {error.filename}: {os_message(error)}; use another path'), file=sys.stderr)
        return EXIT_BAD_INPUT


def _is_stdout_closed() -> bool:
    """Returns True if stdout is a pipe whose reader has exited."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except OSError:
        # stdout was replaced by an object that is not a file.
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
