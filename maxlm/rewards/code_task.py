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


def extract_code(response: str) -> str:
    """The last block of Python in a response; all of it if it has no block at all."""
    blocks = [match.groups()[1:] for match in FENCE.finditer(response)]
    if not blocks:
        return response
    return next((code for language, code in reversed(blocks) if language.lower() in PYTHON), '')


def sandbox_jobs(response: str, task: Mapping[str, Any], limits: SandboxLimits | None = None) -> list[SandboxJob]:
    """Returns the jobs of a task: one with the tests and one for each case. InputError if it has neither."""
    if not any(task.get(key) for key in KEYS):
        raise InputError(f'a task for a Python program has neither {" nor ".join(KEYS)}; it has: {", ".join(task)}')
    sections = task.get('prefix', ''), extract_code(response), task.get('suffix', '')
    text = '\n'.join(section for section in sections if section)
    jobs = []
    if tests := task.get('tests'):
        jobs.append(SandboxJob(text, tests=tests if isinstance(tests, str) else '\n'.join(tests), limits=limits))
    for case in task.get('cases') or ():
        if 'stdout' not in case:
            raise InputError("a case of a task has no 'stdout', the output that is expected")
        jobs.append(SandboxJob(text, stdin=case.get('stdin', ''), limits=limits))
    return jobs


def outputs_match(actual: str, expected: str) -> bool:
    """Returns whether two outputs agree, ignoring trailing spaces and trailing empty lines."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(actual) == lines(expected)


def fraction_passed(results: Sequence[ExecutionResult], task: Mapping[str, Any]) -> float:
    """Returns the fraction of passed tests and cases of a task. `results` are those of `sandbox_jobs`, in order."""
    cases = task.get('cases') or ()
    test_results, case_results = results[: len(results) - len(cases)], results[len(results) - len(cases) :]
    total = sum(max(1, result.tests) for result in test_results) + len(cases)
    passed = sum(result.tests_passed for result in test_results)
    for result, case in zip(case_results, cases, strict=True):
        passed += result.status == 'passed' and outputs_match(result.stdout, case['stdout'])
    return passed / total


def run_tasks(
    pool: SandboxPool, responses: Sequence[str], tasks: Sequence[Mapping[str, Any]], limits: SandboxLimits | None = None
) -> list[float]:
    """The share passed of each task by its response, all run side by side."""
    jobs_by_task = [sandbox_jobs(response, task, limits) for response, task in zip(responses, tasks, strict=True)]
    results = iter(pool.run_many([job for jobs in jobs_by_task for job in jobs]))
    return [
        fraction_passed([next(results) for _ in jobs], task) for jobs, task in zip(jobs_by_task, tasks, strict=True)
    ]
