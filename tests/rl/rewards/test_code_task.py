"""Tests the conversion of a response to programs, and of the results to the fraction of passed tests."""

import pytest

from maxlm.errors import InputError
from maxlm.rl.rewards.code_task import extract_code, fraction_passed, outputs_match, run_tasks, sandbox_jobs
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.pool import ExecutionResult, SandboxPool


@pytest.mark.parametrize(
    ('response', 'code'),
    [
        ('x = 1', 'x = 1'),
        ('Text\n```python\nx = 1\n```\nmore', 'x = 1\n'),
        ('```\nx = 1\n```', 'x = 1\n'),
        ('```py\na\n```\n```Python\nb\n```', 'b\n'),
        ('```python\na\n```\n```bash\nb\n```', 'a\n'),
        ('```bash\nb\n```', ''),
        ('```python\nx = """\n``\n"""', 'x = """\n``\n"""'),
        ('````python\n```\nx\n```\n````', '```\nx\n```\n'),
        ('Use `x`.', 'Use `x`.'),
    ],
)
def test_the_code_of_a_response(response, code):
    assert extract_code(response) == code


def test_the_programs_of_a_task():
    limits = SandboxLimits(wall_seconds=1)
    task = {'prefix': 'import math', 'suffix': 'main()', 'tests': ['assert 1', 'assert 2']}
    task['cases'] = [{'stdin': '1', 'stdout': '2'}, {'stdout': '3'}]
    tested, first, second = sandbox_jobs('```python\nx = 1\n```', task, limits)
    assert tested == ('import math\nx = 1\n\nmain()', '', 'assert 1\nassert 2', limits)
    assert first == tested._replace(stdin='1', tests='')
    assert second.stdin == ''
    with pytest.raises(InputError, match='must have tests or cases; found keys: answer'):
        sandbox_jobs('x', {'answer': 1})
    with pytest.raises(InputError, match="has no 'stdout'"):
        sandbox_jobs('x', {'cases': [{'stdin': '1'}]})


@pytest.mark.parametrize(
    ('output', 'expected', 'same'),
    [
        ('1\n2\n', '1\n2', True),
        ('1 \n2\n\n', '1\n2\n', True),
        ('1\n\n2', '1\n2', False),
        (' 1', '1', False),
        ('', '1', False),
    ],
)
def test_outputs_match_except_for_trailing_whitespace(output, expected, same):
    assert outputs_match(output, expected) is same


def test_the_fraction_counts_tests_and_cases():
    tested = ExecutionResult('failed', '', '', 0.1, None, tests=3, tests_passed=1)
    ran = ExecutionResult('passed', '2\n', '', 0.1, 0)
    task = {'tests': 'x', 'cases': [{'stdout': '2'}, {'stdout': '3'}]}
    assert fraction_passed([tested, ran, ran], task) == 2 / 5
    assert fraction_passed([tested, ran._replace(status='error'), ran._replace(stdout='3')], task) == 2 / 5
    # The program never reached its tests, so their number is unknown.
    assert fraction_passed([tested._replace(tests=0, tests_passed=0)], {'tests': 'x'}) == 0.0


@pytest.mark.multiprocess
def test_tasks_are_run():
    cases = [{'stdin': '3', 'stdout': '9\n'}, {'stdin': '-3', 'stdout': '9'}, {'stdin': '0', 'stdout': '1'}]
    tasks = [{'cases': cases}, {'prefix': 'def f(x):', 'tests': 'assert f(2) == 4'}]
    with SandboxPool(2, limits=SandboxLimits(wall_seconds=30.0)) as pool:
        assert run_tasks(pool, ['print(int(input()) ** 2)', '    return x * x'], tasks) == [2 / 3, 1.0]
