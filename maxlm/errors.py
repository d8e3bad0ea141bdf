"""Errors, exit codes and termination of commands: one line for the user, an exit code for scripts."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

from maxlm.console import make_output_optional, survive_lost_terminal
from maxlm.renames import OPTIONS, report_renamed

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

# Argument that makes a command return its parser. No command line can contain NUL.
_GIVE_PARSER = '\0'
# Errors of paths, which do not disappear when the command is repeated.
_PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EISDIR, errno.ENOTDIR)
_REPEATED = re.compile(r'argument (\S+): =')


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
    """SIGTERM or SIGHUP was received; see `exit_on_termination`.

    Code that re-raises KeyboardInterrupt also re-raises this.
    """


class _ParserError(Exception):
    """Carries the parser out of the main function of a command; see `parser_of`."""

    def __init__(self, parser: ArgumentParser):
        self.parser = parser


class ArgumentParser(argparse.ArgumentParser):
    """argparse with InputError for errors: one line and exit code 2, like all invalid input.

    If the error of a `type` starts with `=`, the message starts with the option: `--option=value: …`.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accepts underscores in option names, and former option names; see `maxlm.renames`."""
        command = self.prog.rpartition('maxlm ')[2]
        words = list(sys.argv[1:] if args is None else args)
        if words == [_GIVE_PARSER]:
            raise _ParserError(self)
        end = words.index('--') if '--' in words else len(words)
        words[:end] = [self._current(command, word) for word in words[:end]]
        return super().parse_known_args(words, namespace)

    def _current(self, command: str, word: str) -> str:
        name, equals, value = word.partition('=')
        kebab = name.replace('_', '-')
        current = OPTIONS.get(command, {}).get(kebab, kebab)
        if not name.startswith('--') or current not in self._option_string_actions:
            return word
        if current != kebab:
            report_renamed(f'{command} {kebab}', current)
        return f'{current}{equals}{value}'

    def error(self, message: str) -> NoReturn:
        if match := _REPEATED.match(message):
            raise InputError(message.replace(match[0], f'{match[1]}=', 1))
        raise InputError(f'{message} (see {self.prog} --help)')


def parser_of(main: Callable[[list[str]], int]) -> ArgumentParser:
    """Returns the parser of a command with this main function, without running the command."""
    try:
        main([_GIVE_PARSER])
    except _ParserError as carrier:
        return carrier.parser
    raise TypeError(f'{main.__module__}.{main.__qualname__} does not parse its arguments with ArgumentParser')


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


def text_argument(value: str) -> str:
    """Returns the value of a text option; an argparse type that rejects values that are not UTF-8."""
    place = surrogate_in(value)
    if place >= 0:
        byte = len(os.fsencode(value[:place]))
        raise argparse.ArgumentTypeError(f'byte {byte} of the value is not UTF-8; use UTF-8 text')
    return value


def nearest(word: str, options: Iterable[str]) -> str:
    """Returns the end of an error message: the closest option, or all options if none is close."""
    import difflib  # only needed for errors

    options = list(options)
    closest = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if closest:
        return f'did you mean {closest[0]!r}?'
    return f'available: {", ".join(options)}' if options else 'none available'


def os_message(error: OSError) -> str:
    """Returns the reason of an OSError, e.g. `Permission denied`, without its number and path."""
    return error.strerror or str(error)


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


def run_command(command: Callable[[list[str]], int | None], *, output_is_optional: bool = False) -> int:
    """Runs `command` as the main function of this process with its arguments, and returns its exit code.

    SIGTERM and the loss of the terminal (SIGHUP) end the command with EXIT_PREEMPTED; see `exit_on_termination`.

    Args:
        command: main function.
        output_is_optional: see `survive_lost_terminal`.
    """
    survive_lost_terminal(output_is_optional=output_is_optional)
    exit_on_termination()
    code = exit_code(command, sys.argv[1:])
    # The process may exit only after a second or two, as with JAX. Another signal would change the exit code, which a
    # launcher reports as a crash. A failed command can still be ended.
    action = signal.SIG_IGN if code in (EXIT_DONE, EXIT_DEVICE, EXIT_PREEMPTED) else signal.SIG_DFL
    for number in termination_signals():
        signal.signal(number, action)
    return code


def termination_signals() -> tuple[signal.Signals, ...]:
    """Returns SIGTERM, and SIGHUP unless it is ignored, as under `nohup`."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


def signal_reason(number: int) -> str:
    """Returns the name of a signal, with its cause if that is not obvious."""
    if number != signal.SIGHUP:
        return signal.Signals(number).name
    # The programs that read the output end at the same time.
    make_output_optional()
    return 'SIGHUP (the terminal was closed)'


def exit_on_termination() -> None:
    """Makes the next SIGTERM or SIGHUP end the command with one line and EXIT_PREEMPTED; further ones are ignored.

    The handler raises a TerminatedError, which `exit_code` handles. During imports, an exception would not work:
    extension modules replace it with ImportError, and optional imports suppress it. The handler then exits immediately,
    without closing contexts. During training, `maxlm.runtime.preemption.StopRequest` handles the signals.
    """
    numbers = termination_signals()

    def receive(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        message = f'{signal_reason(number)}: stopped; run the same command again to continue'
        if not _is_importing(frame):
            raise TerminatedError(message)
        # print is not reentrant, and the signal may have interrupted it. The terminal may be closed.
        with contextlib.suppress(OSError):
            os.write(2, f'{message}\n'.encode())
        os._exit(EXIT_PREEMPTED)

    for number in numbers:
        signal.signal(number, receive)


def _is_importing(frame: FrameType | None) -> bool:
    while frame:
        if frame.f_code.co_filename.startswith('<frozen importlib'):
            return True
        frame = frame.f_back
    return False
