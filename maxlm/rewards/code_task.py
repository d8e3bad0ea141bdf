"""Tasks that ask for a Python program: from a response to the programs that the sandbox runs, and back to a share.

A task is a mapping with either or both of
| key | holds |
|---|---|
| `tests` | a text or a list of texts: see `testing` for what counts as a test |
| `cases` | mappings with `stdin` and the `stdout` that is expected |
and, if wanted, `prefix`, a text put before the program (imports, the signature that the response goes on from), and
`suffix`, one put after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.errors import InputError
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.pool import ExecutionResult, SandboxJob, SandboxPool

# A fence of three or more backquotes, its language, the code up to the fence that closes it or the end.
# Possessive, so that a long line of backquotes takes no time.
FENCE = re.compile(r'^[ \t]*+(`{3,}+)[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\1[ \t]*$|\Z)', re.DOTALL | re.MULTILINE)
PYTHON = ('python', 'py', 'python3', '')
KEYS = 'tests', 'cases'


def code_of(response: str) -> str:
    """The last block of Python in a response; all of it if it has no block at all."""
    blocks = [match.groups()[1:] for match in FENCE.finditer(response)]
    if not blocks:
        return response
    return next((code for language, code in reversed(blocks) if language.lower() in PYTHON), '')


def programs_of(response: str, task: Mapping[str, Any], limits: SandboxLimits | None = None) -> list[SandboxJob]:
    """What is to be run for a task: a program with the tests, and one for each case. InputError if it has neither."""
    if not any(task.get(key) for key in KEYS):
        raise InputError(f'a task for a Python program has neither {" nor ".join(KEYS)}; it has: {", ".join(task)}')
    parts = task.get('prefix', ''), code_of(response), task.get('suffix', '')
    text = '\n'.join(part for part in parts if part)
    programs = []
    if tests := task.get('tests'):
        programs.append(SandboxJob(text, tests=tests if isinstance(tests, str) else '\n'.join(tests), limits=limits))
    for case in task.get('cases') or ():
        if 'stdout' not in case:
            raise InputError("a case of a task has no 'stdout', the output that is expected")
        programs.append(SandboxJob(text, stdin=case.get('stdin', ''), limits=limits))
    return programs


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs agree but for spaces at the ends of lines and empty lines at the end."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(found) == lines(expected)


def share_passed(verdicts: Sequence[ExecutionResult], task: Mapping[str, Any]) -> float:
    """Of all tests and cases of a task, those passed: 0 to 1. `verdicts` are of `programs_of`, in order."""
    cases = task.get('cases') or ()
    tested, of_cases = verdicts[: len(verdicts) - len(cases)], verdicts[len(verdicts) - len(cases) :]
    total = sum(max(1, verdict.tests) for verdict in tested) + len(cases)
    passed = sum(verdict.tests_passed for verdict in tested)
    for verdict, case in zip(of_cases, cases, strict=True):
        passed += verdict.status == 'passed' and same_output(verdict.stdout, case['stdout'])
    return passed / total


def run_tasks(
    pool: SandboxPool, responses: Sequence[str], tasks: Sequence[Mapping[str, Any]], limits: SandboxLimits | None = None
) -> list[float]:
    """The share passed of each task by its response, all run side by side."""
    programs = [programs_of(response, task, limits) for response, task in zip(responses, tasks, strict=True)]
    verdicts = iter(pool.run_many([program for several in programs for program in several]))
    return [
        share_passed([next(verdicts) for _ in several], task) for several, task in zip(programs, tasks, strict=True)
    ]
