"""Calls rewards of the user in a process of their own, while this process trains and generates.

A reward may use signals for time limits, which Python delivers to the main thread of a process only. It therefore runs
in the main thread of the process, which calls one response after the other. The functions are trusted: the process has
the environment, the working directory and the output of this one, but no accelerator for JAX, which this process holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from maxlm.config.user_function import load_function
from maxlm.errors import InputError
from maxlm.sandbox.functions import FunctionCall, UserFunction
from maxlm.sandbox.process.interpreter import REFUSED, REQUEST, RESULT, kill, receive, send, start_interpreter
from maxlm.sandbox.program.function_call import FunctionResult, call_function

_PARENT_INTERVAL_SECONDS = 1.0
NOT_CALLED = FunctionResult(error='was not called')


class RewardProcess:
    """A process with rewards of the user. Close it, or use it in a `with` statement."""

    def __init__(self, functions: Sequence[UserFunction]):
        """Starts the process, which imports the functions. InputError if one cannot be imported."""
        self._lock = threading.Lock()
        self._process, self._connection = start_interpreter(
            f'{__name__}:serve',
            json.dumps([function._asdict() for function in functions]),
            path=[folder or os.getcwd() for folder in sys.path],
            environment={**os.environ, 'JAX_PLATFORMS': 'cpu'},
            is_trusted=True,
        )
        try:
            kind, text = receive(self._connection)
        except (EOFError, OSError):
            code = kill(self._process)
            self._connection.close()
            names = ', '.join(function.name for function in functions)
            raise InputError(
                f'reward {names}: the import ended its process (exit code {code}); fix the module'
            ) from None
        if kind == REFUSED:
            self.close()
            raise InputError(text.decode())

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the process. A call in another thread ends with an error."""
        kill(self._process)
        self._connection.close()

    def call(self, calls: Sequence[FunctionCall]) -> list[FunctionResult]:
        """Calls functions one after the other and returns their results. After an error, no function is called.

        The result of a call whose process has ended has an `error`, as the results of all later calls.
        """
        results: list[FunctionResult] = []
        with self._lock:
            for call in calls:
                results.append(self._call(call))
                if results[-1].error:
                    break
        return results + [NOT_CALLED] * (len(calls) - len(results))

    def _call(self, call: FunctionCall) -> FunctionResult:
        try:
            send(self._connection, REQUEST, json.dumps(call._asdict()).encode())
            return FunctionResult(*json.loads(receive(self._connection)[1]))
        except (EOFError, OSError):
            return FunctionResult(error=f'ended its process (exit code {kill(self._process)})')


def serve(connection: socket.socket, functions: str) -> None:
    """Calls functions in the main thread until the connection is closed."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # A scheduler may send the signal to all processes. The run then saves a checkpoint, before which it may need
    # rewards. Programs that a reward starts do not inherit the handler.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        loaded = {function['name']: load_function(**function) for function in json.loads(functions)}
    except InputError as error:
        send(connection, REFUSED, str(error).encode())
        return
    send(connection, RESULT, b'')
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            call = FunctionCall(**json.loads(receive(connection)[1]))
            result = call_function(loaded[call.name], *call.arguments, **call.keywords)
            send(connection, RESULT, json.dumps(result).encode())


def _end_with_parent(parent: int) -> None:
    """Ends this process, also during a call, when its parent has been killed."""
    while os.getppid() == parent:
        time.sleep(_PARENT_INTERVAL_SECONDS)
    os._exit(1)
