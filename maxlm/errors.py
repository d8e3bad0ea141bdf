"""How a command ends: one line on what went wrong for the person, an exit code for the script."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from maxlm.renames import OPTIONS, report_renamed

EXIT_DONE = 0
# The run itself went wrong, e.g. its loss is not finite any more.
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
# EX_TEMPFAIL of sysexits.h: stopped from outside with the state saved; starting again goes on.
EXIT_PREEMPTED = 75
# What a shell reports for a program ended by SIGINT.
EXIT_INTERRUPTED = 130

_REPEATED = re.compile(r'argument (\S+): =')


class InputError(Exception):
    """What the user gave cannot be used.

    The message is one line that names the file, key or value at fault and says what would be right. Commands print it
    without a traceback and exit with code 2; whoever raises it has left nothing half-written.
    """


class TerminatedError(KeyboardInterrupt):
    """SIGTERM; see `exit_on_sigterm`. Code that passes Ctrl-C on passes it on too."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are InputErrors: one line, exit code 2, like all other bad input.

    The error of a `type` that begins with `=` repeats the value: it becomes `--option=value: …`.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accepts underscores in names of options, and the names that options had before; see `maxlm.renames`."""
        command = self.prog.rpartition('maxlm.')[2]
        words = list(sys.argv[1:] if args is None else args)
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


def flag(name: str) -> str:
    """Returns the option of a name of an argparse.Namespace: `max_files` → `--max-files`."""
    return f'--{name.replace("_", "-")}'


def surrogate_in(text: str) -> int:
    """Returns the place of the first surrogate in `text`, which is not Unicode text; -1 = there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1


def text_argument(value: str) -> str:
    """Returns the value of an option that is text; an argparse type that refuses what is not UTF-8."""
    place = surrogate_in(value)
    if place >= 0:
        byte = len(os.fsencode(value[:place]))
        raise argparse.ArgumentTypeError(f'byte {byte} of the value is not UTF-8; give text in UTF-8')
    return value


def os_message(error: OSError) -> str:
    """The plain reason of an OSError, e.g. `Permission denied`, without its number and path."""
    return error.strerror or str(error)


def exit_code(command: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Runs `command(argv)`; an InputError becomes one line on stderr and exit code 2."""
    try:
        return command(argv) or EXIT_DONE
    except InputError as error:
        line = ' '.join(str(error).split())
        print(f'error: {line}', file=sys.stderr)
        return EXIT_BAD_INPUT
    except TerminatedError as error:
        print(error, file=sys.stderr)
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return EXIT_INTERRUPTED


def exit_on_sigterm(*, importing: bool) -> None:
    """Makes the next SIGTERM end the command with one line and EXIT_PREEMPTED; further ones are ignored.

    This is for the time in which a run cannot save. While it trains, `maxlm.runtime.preemption.StopRequest` handles the
    signal.

    Args:
        importing: exit at once, without leaving contexts. An exception would not do while modules are imported:
            extension modules replace it with ImportError, and optional imports suppress it. Otherwise, the handler
            raises a TerminatedError, which `exit_code` handles.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        message = 'SIGTERM while the run was not training; start again to continue it'
        if not importing:
            raise TerminatedError(message)
        # Not by print, which the signal may have interrupted.
        os.write(2, f'{message}\n'.encode())
        os._exit(EXIT_PREEMPTED)

    signal.signal(signal.SIGTERM, receive)
