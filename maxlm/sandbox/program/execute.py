"""The text of a program, run in the process that has been shut in for it."""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import linecache
import os
import signal
import sys
import tempfile
import threading
import traceback
import types
from typing import NoReturn

from maxlm.sandbox.program.rpc_protocol import Channel
from maxlm.sandbox.program.rpc_server import serve_tests

FILE = 'program.py'
ENVIRONMENT = {'HOME': '/tmp', 'TMPDIR': '/tmp', 'LANG': 'C.UTF-8', 'PATH': ''}
EXIT_ERROR = 1


def run_text(text: str, channel: Channel | None, folder: str) -> NoReturn:
    """Runs `text` as a script on its standard streams, or as a module for the tests at the other end of `channel`.

    Ends the process as an interpreter would: threads, atexit, streams, exit code.
    """
    prepare_interpreter(folder)
    code = execute(text, '__main__' if channel is None else 'program')
    if channel is not None and code == 0:
        serve_tests(channel, vars(sys.modules['program']))
    exit_interpreter(code)


def prepare_interpreter(folder: str) -> None:
    """As fresh as one that has just been started, without the worker's ways."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT | {'HOME': folder, 'TMPDIR': folder})
    sys.argv = [FILE]
    # The worker has looked for a folder before, and it is remembered.
    tempfile.tempdir = None
    sys.stdin = open(0, encoding='utf-8', errors='surrogateescape', closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, 'wb', closefd=False), encoding='utf-8', errors='surrogateescape')  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(
        open(2, 'wb', buffering=0, closefd=False),  # noqa: SIM115
        encoding='utf-8',
        errors='backslashreplace',
        write_through=True,
    )
    for name in ('stdin', 'stdout', 'stderr'):
        setattr(sys, f'__{name}__', getattr(sys, name))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The usual way to write a script's last line, which site would have brought.
    for name in ('exit', 'quit'):
        setattr(builtins, name, sys.exit)
    gc.enable()


def execute(text: str, name: str) -> int:
    """Runs the text as the module `name`; its exit code."""
    module = types.ModuleType(name)
    module.__file__ = FILE
    sys.modules[name] = module
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    try:
        exec(compile(text, FILE, 'exec', dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if name != '__main__':
            print('the program ended itself before its tests began', file=sys.stderr)
            return EXIT_ERROR
        if stop.code is None or isinstance(stop.code, int):
            return int(stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return EXIT_ERROR
    except BaseException as error:
        print_traceback(error)
        return EXIT_ERROR
    return 0


def print_traceback(error: BaseException) -> None:
    """The traceback without the frames of the sandbox."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != FILE:
        frames = frames.tb_next
    try:
        traceback.print_exception(type(error), error, frames)
    except BaseException:
        os.write(2, f'{type(error).__name__}\n'.encode())


def exit_interpreter(code: int) -> NoReturn:
    """The end of an interpreter, in its order; the process is a fork, whose frames below must not go on."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        print_traceback(error)
        code = code or EXIT_ERROR
    os._exit(code)
