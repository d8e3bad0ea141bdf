"""Runs checks one after another. A check that hangs or raises is reported as a failure, and the next check runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.jax_subprocess import disable_accelerator_search
from maxlm.diagnostics.result import CheckResult, CheckStatus, failure, skipped
from maxlm.errors import InputError

THREAD_PREFIX = 'maxlm check '
CLEANUP_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: name in --skip and --only.
        function_path: `module:function` of the check. It is imported when the check runs, so that a missing package is
            reported as a failure.
        seconds: timeout.
        description: description of the check.
        uses_devices: whether it needs JAX in this process.
    """

    name: str
    function_path: str
    seconds: float
    description: str
    uses_devices: bool = False

    def run(self, context: CheckContext) -> CheckResult:
        """Runs the function of the check. Its exceptions propagate."""
        module, _, function = self.function_path.partition(':')
        result = getattr(importlib.import_module(f'maxlm.diagnostics.checks.{module}'), function)(context)
        assert isinstance(result, CheckResult), self.function_path
        return result


@dataclasses.dataclass(frozen=True)
class Result:
    """Result and duration of a check."""

    name: str
    finding: CheckResult
    seconds: float


def run_checks(
    checks: Iterable[Check], context: CheckContext, *, on_begin: Callable[[Check], object] = lambda check: None
) -> Iterator[Result]:
    """Yields the results in the order of the checks.

    Checks that use devices are skipped if JAX does not start in a subprocess, because it would abort this process. They
    are also skipped after one of them hangs, because they would wait for the same resource. `on_begin` is called before
    each check.
    """
    hanging = ''
    for check in checks:
        on_begin(check)
        began = time.monotonic()
        if check.uses_devices and hanging:
            finding = skipped(f'not run: the check {hanging!r} hangs')
        else:
            finding = with_timeout(check, context)
            if finding is HANGS:
                finding = _hang(check)
                hanging = check.name if check.uses_devices else hanging
        yield Result(check.name, finding, time.monotonic() - began)


# Marks a timeout; compared by identity.
HANGS = CheckResult(CheckStatus.FAILURE, '')


def with_timeout(check: Check, context: CheckContext) -> CheckResult:
    """Returns the result of a check, or HANGS after its timeout. The thread of a hanging check keeps running."""
    results: list[CheckResult] = []

    def target() -> None:
        try:
            if check.uses_devices:
                if context.jax_start.error:
                    results.append(skipped(f'not run: {context.jax_start.error}'))
                    return
                disable_accelerator_search(context.jax_start)
            results.append(check.run(context))
        except InputError as error:
            results.append(failure(' '.join(str(error).split()), 'fix this, and run doctor again'))
        except ImportError as error:
            results.append(
                failure(f'cannot run: {" ".join(str(error).split())}', 'install the missing package: see packages')
            )
        # Catch everything, so that all other checks still run.
        except BaseException as error:
            line = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
            results.append(failure(f'the check itself failed with {line}', 'report a bug, with this line'))

    thread = threading.Thread(target=target, name=f'{THREAD_PREFIX}{check.name}', daemon=True)
    thread.start()
    thread.join(check.seconds)
    return results[0] if results else HANGS


def _hang(check: Check) -> CheckResult:
    return failure(
        f'no answer after {check.seconds:g} s: {check.description}',
        f'find out what it waits for, or skip it with --skip={check.name}',
    )


def exit_process(code: int) -> NoReturn:
    """Exits the process, even if the thread of a check hangs in a driver and cannot be joined."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]
    if threads:
        _end_children()
        for thread in threads:
            # Threads that waited for a child process clean up now.
            thread.join(CLEANUP_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.is_alive() for thread in threads):
        os._exit(code)
    sys.exit(code)


def _end_children() -> None:
    try:
        import psutil
    except ImportError:
        return
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
