"""Executes the text of a program in its isolated process."""

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
    """Runs `text` as a script, or as a module for the tests connected to `channel`.

    Exits the process as an interpreter does: joins threads, runs atexit functions, flushes streams, sets the exit code.
    """
    prepare_interpreter(folder)
    code = execute(text, '__main__' if channel is None else 'program')
    if channel is not None and code == 0:
        serve_tests(channel, vars(sys.modules['program']))
    exit_interpreter(code)


def prepare_interpreter(folder: str) -> None:
    """Resets the interpreter to the state of a new one, without settings of the worker."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT | {'HOME': folder, 'TMPDIR': folder})
    sys.argv = [FILE]
    # The worker has cached its own temporary directory.
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
    # Scripts often end with exit() or quit(), which the site module would define.
    for name in ('exit', 'quit'):
        setattr(builtins, name, sys.exit)
    gc.enable()


def execute(text: str, name: str) -> int:
    """Runs the text as the module `name` and returns its exit code."""
    module = types.ModuleType(name)
    module.__file__ = FILE
    sys.modules[name] = module
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    try:
        exec(compile(text, FILE, 'exec', dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if name != '__main__':
            print('the program exited before its tests began', file=sys.stderr)
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
    """Prints the traceback without the frames of the sandbox."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != FILE:
        frames = frames.tb_next
    try:
        traceback.print_exception(type(error), error, frames)
    except BaseException:
        os.write(2, f'{type(error).__name__}\n'.encode())


def exit_interpreter(code: int) -> NoReturn:
    """Shuts down in the order of an interpreter and exits. Calling frames belong to the worker and must not resume."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException as error:
        print_traceback(error)
        code = code or EXIT_ERROR
    os._exit(code)
