"""Runs functions of the user in the sandbox.

Each call runs in its own process with the guarantees and limits of `maxlm.sandbox.pool`. In addition to Python's files,
it can read the installed packages and the directories from which the functions are imported. Workers import the
functions once, before the first call. A function is trusted, its arguments are not. A function that executes its
arguments shares its process with them. They can then choose the number, the text or the error of the result, but
nothing else: `read_result` validates each result.

    with FunctionPool([UserFunction('my_rewards:brevity', 'reward', ('response', 'prompt'))]) as functions:
        results = functions.call([FunctionCall('my_rewards:brevity', ('a b', {'max_words': 1}))])
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import maxlm
from maxlm.config.user_function import import_directory
from maxlm.errors import InputError
from maxlm.sandbox.limits import MIB, SandboxLimits
from maxlm.sandbox.pool import ExecutionResult, SandboxJob, SandboxPool
from maxlm.sandbox.program.function_call import PROGRAM, FunctionResult, read_result
from maxlm.sandbox.python_paths import package_folders


class UserFunction(NamedTuple):
    """A function of the user, as arguments of `load_function`."""

    name: str
    kind: str
    arguments: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()


class FunctionCall(NamedTuple):
    """A call of a function. The arguments are JSON values."""

    name: str
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = {}


class FunctionPool:
    """Sandbox workers with functions of the user. Close it, or use it in a `with` statement."""

    def __init__(
        self, functions: Sequence[UserFunction], *, workers: int | None = None, limits: SandboxLimits | None = None
    ):
        """Starts the workers, which import the functions.

        Args:
            functions: functions that can be called.
            workers: number of calls that run at the same time; defaults to the number of cores of this process.
            limits: limits of one call.

        Raises:
            InputError: a function cannot be imported, or this machine cannot isolate untrusted programs.
        """
        found = dict.fromkeys(import_directory(function.name, kind=function.kind) for function in functions)
        directories = [directory for directory in found if directory is not None]
        for directory in {'/', os.path.realpath(os.path.expanduser('~'))} & set(directories):
            raise InputError(
                f'the sandbox would show all files below {directory} to functions of modules in it; move them to '
                'a directory that contains no secrets'
            )
        packages, root = package_folders(), Path(os.path.realpath(maxlm.__file__)).parent
        self._pool = SandboxPool(
            num_cores() if workers is None else workers,
            limits=limits,
            functions=[function._asdict() for function in functions],
            path=[*packages, str(root.parent), *directories],
            readable=[*packages, str(root), *directories],
        )

    def __enter__(self) -> FunctionPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops all workers."""
        self._pool.close()

    def __str__(self) -> str:
        return str(self._pool.sandbox)

    def call(self, calls: Sequence[FunctionCall]) -> list[FunctionResult]:
        """Calls functions in parallel and returns their results in the same order.

        A call that exceeds a limit, whose process dies, or whose process writes no valid result has an `error`.
        """
        token = secrets.token_hex(16)
        jobs = [SandboxJob(PROGRAM, stdin=json.dumps({**call._asdict(), 'token': token})) for call in calls]
        return [self._result(result, token) for result in self._pool.run_many(jobs)]

    def _result(self, result: ExecutionResult, token: str) -> FunctionResult:
        if result.status == 'passed' and result.stdout:
            try:
                return read_result(result.stdout, token)
            except ValueError as error:
                return FunctionResult(error=f'has an invalid result in the sandbox: {error}')
        limits = self._pool.limits
        return FunctionResult(
            error={
                'timeout': f'exceeded {limits.cpu_seconds:g} s of CPU time or {limits.wall_seconds:g} s in the sandbox',
                'memory': f'exceeded {limits.memory_bytes / MIB:g} MiB of memory in the sandbox',
                'output': f'printed more than {limits.output_bytes / MIB:g} MiB in the sandbox',
            }.get(result.status, f'ended its process in the sandbox (exit code {result.exit_code})')
        )


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    # The affinity can contain fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
