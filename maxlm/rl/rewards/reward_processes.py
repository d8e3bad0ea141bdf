"""Computes rewards of the user in several processes at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from maxlm.rl.rewards.reward_process import NOT_CALLED, RewardProcess
from maxlm.sandbox.functions import FunctionCall, UserFunction
from maxlm.sandbox.program.function_call import FunctionResult


class RewardProcesses:
    """Processes with rewards of the user. Close them, or use them in a `with` statement.

    Each call runs in the next free process, so the result of a function must depend on its arguments only.
    """

    def __init__(self, functions: Sequence[UserFunction], number: int):
        """Starts `number` processes, which import the functions. InputError if one cannot be imported."""
        with contextlib.ExitStack() as stack:
            self._processes = [stack.enter_context(RewardProcess(functions)) for _ in range(number)]
            self._stack = stack.pop_all()

    def __enter__(self) -> RewardProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes. Calls in other threads end with an error."""
        self._stack.close()

    def call(self, calls: Sequence[FunctionCall]) -> list[FunctionResult]:
        """Returns the results of calls in their order. After an error, no further function is called.

        The first error does not depend on times, because all earlier calls have begun before it.
        """
        results = [NOT_CALLED] * len(calls)
        lock, remaining = threading.Lock(), iter(range(len(calls)))
        failed = threading.Event()

        def serve(process: RewardProcess) -> None:
            while not failed.is_set():
                with lock:
                    index = next(remaining, None)
                if index is None:
                    return
                (results[index],) = process.call([calls[index]])
                if results[index].error:
                    failed.set()

        threads = [
            threading.Thread(target=serve, args=(process,), name='reward', daemon=True) for process in self._processes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
