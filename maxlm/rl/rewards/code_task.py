"""Tasks that require a Python program: creates sandbox jobs from responses, and computes the fraction of passed tests.

A task is a mapping with at least one of these keys:

| key | value |
|---|---|
| `tests` | a text or a list of texts; `maxlm.sandbox.program.unit_tests` defines tests |
| `cases` | mappings with `stdin` and the expected `stdout` |

Optional keys are `prefix`, a text inserted before the program (imports, or a signature that the response continues),
and `suffix`, a text appended to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.errors import InputError
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.pool import ExecutionResult, SandboxJob, SandboxPool

# A fence of three or more backquotes, its language, and the code up to the closing fence or the end of the text.
# Possessive quantifiers avoid backtracking in long lines of backquotes.
FENCE = re.compile(r'^[ \t]*+(`{3,}+)[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\1[ \t]*$|\Z)', re.DOTALL | re.MULTILINE)
PYTHON = ('python', 'py', 'python3', '')
KEYS = 'tests', 'cases'


def extract_code(response: str) -> str:
    """Returns the last Python block of a response, '' if all blocks are in other languages.

    Without any code block, the entire response is the program.
    """
    blocks = [match.groups()[1:] for match in FENCE.finditer(response)]
    if not blocks:
        return response
    return next((code for language, code in reversed(blocks) if language.lower() in PYTHON), '')


def sandbox_jobs(response: str, task: Mapping[str, Any], limits: SandboxLimits | None = None) -> list[SandboxJob]:
    """Returns the jobs of a task: one with the tests and one for each case. InputError if it has neither.

    Each job runs the program of `response` between the prefix and suffix of the task.
    """
    if not any(task.get(key) for key in KEYS):
        raise InputError(f'the task must have {" or ".join(KEYS)}; found keys: {", ".join(task) or "none"}')
    sections = task.get('prefix', ''), extract_code(response), task.get('suffix', '')
    text = '\n'.join(section for section in sections if section)
    jobs = []
    if tests := task.get('tests'):
        jobs.append(SandboxJob(text, tests=tests if isinstance(tests, str) else '\n'.join(tests), limits=limits))
    for case in task.get('cases') or ():
        if 'stdout' not in case:
            raise InputError("a case has no 'stdout'; add the expected output")
        jobs.append(SandboxJob(text, stdin=case.get('stdin', ''), limits=limits))
    return jobs


def outputs_match(actual: str, expected: str) -> bool:
    """Returns True if two outputs are equal except for trailing spaces and trailing empty lines."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(actual) == lines(expected)


def fraction_passed(results: Sequence[ExecutionResult], task: Mapping[str, Any]) -> float:
    """Returns the fraction of passed tests and cases of a task, given the results of its `sandbox_jobs` in order."""
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
    """Returns the fraction of passed tests of each task for its response. All jobs run in parallel."""
    jobs_by_task = [sandbox_jobs(response, task, limits) for response, task in zip(responses, tasks, strict=True)]
    results = iter(pool.run_many([job for jobs in jobs_by_task for job in jobs]))
    return [
        fraction_passed([next(results) for _ in jobs], task) for jobs, task in zip(jobs_by_task, tasks, strict=True)
    ]
