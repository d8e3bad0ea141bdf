"""Tests that whatever a process writes as the result of a function is a valid result or one failed call."""

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maxlm.rl.rewards.rewards import find_reward
from maxlm.rl.rewards.tools import Tools
from maxlm.sandbox.functions import FunctionPool
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.pool import ExecutionResult
from maxlm.sandbox.program.function_call import MAX_ERROR, FunctionResult, call_function, read_result

TOKEN = '0' * 32
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
) | st.sampled_from(['\ud800', '\0', '\x1b[2J', 'a\nb', 'raised X: y at z.py:1', 'x' * 2000, 1e308, 10**400])
# Lists of three fields reach the checks of the fields.
RESULTS = VALUES | st.tuples(*[VALUES] * 3) | st.tuples(st.none() | st.floats(), st.text(), st.just('') | VALUES)
# Outputs whose form, size or values stopped a run, or could.
FORGED = [
    *(
        '[1, 5, ""]',
        '[1.0, 5, ""]',
        '[1.0, null, ""]',
        '[true, "", ""]',
        '["1", "", ""]',
        '[1, "", ""]',
        '[-0, "", ""]',
    ),
    *('[1.0, "", 0]', '[1.0, "", []]', '[1.0, "", {}]', '[null, "", ["raised"]]', '[[1.0], "", ""]', '[{}, {}, {}]'),
    *('[1.0, "", "e"]', '[null, "t", "e"]', '[null, "", "a\\nb"]', '[null, "", "\\u001b[2J"]', '[null, "", "\\ud800"]'),
    *('', ' ', '[', '[]', '{}', 'null', '1.0', '"abc"', '[1.0]', '[1.0, ""]', '[1.0, "", "", ""]', 'NaN', '-'),
    *('{"number": 1.0, "text": "", "error": ""}', '{"a": 1.0, "a": "", "b": ""}', '[1.0, "", ""][1.0, "", ""]'),
    *('[1.0, "", ""]\n[1.0, "", ""]', '[1.0, "", ""', '[1.0, "", ""]\0', '\0', '\ufeff[1.0, "", ""]', '\ud800'),
    *(f'[{"1" * 5000}, "", ""]', f'[{10**400}, "", ""]', '[1e400.0, "", ""]', '[+1.0, "", ""]', '[0x1, "", ""]'),
    *('[' * 100_000, '[' * 500 + ']' * 500, '[1.0, "", ' + '[' * 200 + ']' * 200 + ']', '{"a":' * 100_000),
    f'[null, "", "{"x" * (MAX_ERROR + 1)}"]',
]
# Outputs that the function's process can forge: they have the form of a result.
ACCEPTED = {
    '[1.0, "", ""]': FunctionResult(1.0),
    '[-0.0, "", ""]': FunctionResult(-0.0),
    '[1e400, "", ""]': FunctionResult(math.inf),
    '[Infinity, "inf", ""]': FunctionResult(math.inf, 'inf'),
    '[null, "\\ud800\\u0000", ""]': FunctionResult(None, '\ud800\0'),
    '[null, "", "raised"]': FunctionResult(None, '', 'raised'),
    '[1.0, "", ""]\n': FunctionResult(1.0),
}


class Written(FunctionPool):
    """Functions whose processes have written `output`."""

    def __init__(self, output: str, status: str = 'passed'):
        self._pool, self.output, self.status = self, output, status

    limits = SandboxLimits()

    def call(self, calls):
        return [self._result(ExecutionResult(self.status, self.output, '', 0.0, 0), TOKEN) for _ in calls]


class BadName(type):
    """A class whose name is a number."""

    @property
    def __name__(cls):
        return 5


class BadTextError(Exception, metaclass=BadName):
    """An exception whose text cannot be computed."""

    def __str__(self):
        raise SystemExit


def check_output(output: str) -> FunctionResult:
    """Checks a function, a reward and a tool whose process has written `output`, and returns the result."""
    functions = Written(output)
    (result,) = functions.call([None])
    assert isinstance(result, FunctionResult)
    assert type(result.number) in (float, type(None))
    assert type(result.text) is type(result.error) is str
    assert result.error.isprintable()
    (reward,) = find_reward('module:f', functions)(['response'], [{}], None)
    assert reward is None or (type(reward) is float and math.isfinite(reward))
    tools = Tools([], functions)
    tools._names = {'f': 'module:f'}
    (shown,) = tools.run([('f', '{}')])
    shown.text.encode()
    assert shown.is_error == bool(result.error)
    return result


@pytest.mark.parametrize('line', FORGED, ids=range(len(FORGED)))
def test_an_output_of_another_form_is_a_failed_call(line):
    error = check_output(f'{TOKEN} {line}').error
    assert error.startswith('has an invalid result in the sandbox: ')
    assert len(error) < 300


@pytest.mark.parametrize('line', ACCEPTED)
def test_an_output_of_the_form_of_a_result(line):
    assert repr(check_output(f'{TOKEN} {line}')) == repr(ACCEPTED[line])
    for output in (line, f' {line}', f'{TOKEN}{line}', f'{TOKEN[1:]} {line}', f'x{TOKEN} {line}', f'\n{TOKEN} {line}'):
        assert check_output(output).error == (
            'has an invalid result in the sandbox: the output must begin with the token'
        )


@pytest.mark.parametrize('status', ['failed', 'error', 'timeout', 'memory', 'output', 'killed'])
def test_a_result_of_a_process_that_failed_does_not_count(status):
    assert Written(f'{TOKEN} [1.0, "", ""]', status).call([None])[0].error


@given(RESULTS)
@example([math.nan, '', ''])
@example([3.5e38, '', ''])
@example([1e10, '', ''])
def test_any_json_is_a_result_or_a_failed_call(value):
    check_output(f'{TOKEN} {json.dumps(value)}')


@given(st.binary(max_size=40) | st.sampled_from([b'%s [1.0, "", ""]' % TOKEN.encode()]), st.binary(max_size=8))
def test_any_bytes_are_a_result_or_a_failed_call(output, end):
    check_output((output + end).decode(errors='replace'))
    check_output(f'{TOKEN} {(output + end).decode(errors="replace")}')


@given(st.text(max_size=300), st.text(max_size=300) | st.sampled_from(['\ud800', '\x1b[2J', 'a\u2028b']))
@example('Error' * 1000, 'x' * 1000)
def test_exceptions_are_valid_results(name, text):
    try:
        kind = type(name, (Exception,), {})
    except (ValueError, UnicodeEncodeError):
        kind = ValueError

    def fail():
        raise kind(text)

    result = call_function(fail)
    assert read_result(f'{TOKEN} {json.dumps(result)}', TOKEN) == result
    assert result.error.startswith('raised ')


def test_exceptions_without_a_text():
    def fail():
        raise BadTextError

    def end():
        raise SystemExit(3)

    assert call_function(fail).error.startswith(f'raised 5 at {__file__}:')
    assert call_function(end).error.startswith(f'raised SystemExit: 3 at {__file__}:')
