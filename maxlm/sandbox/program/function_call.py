"""Calls a function of the user in the process of a program."""

from __future__ import annotations

import importlib
import json
import numbers
import os
import sys
from typing import Any, NamedTuple

from maxlm.config.user_function import MAX_DESCRIPTION, describe_exception
from maxlm.storage.json_text import parse_json

# Source text of the program; its standard input is the call as JSON, with a token that the result begins with.
PROGRAM = 'from maxlm.sandbox.program.function_call import run\nrun()\n'
# The number of processes of a program is limited, and all cores already run programs.
SINGLE_THREAD = dict.fromkeys(('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'), '1')
_RAISED = 'raised '
MAX_ERROR = len(_RAISED) + MAX_DESCRIPTION


class FunctionResult(NamedTuple):
    """Result of a call.

    Attributes:
        number: returned number; None if the function returned something else or raised an exception.
        text: returned text, or another value as text; dicts and lists as JSON.
        error: problem of the call, e.g. `raised ValueError`; '' if the function returned.
    """

    number: float | None = None
    text: str = ''
    error: str = ''


def call_function(function: Any, /, *arguments: Any, **keywords: Any) -> FunctionResult:
    """Calls a function of the user. The result describes an exception instead of raising it."""
    try:
        value = function(*arguments, **keywords)
        # NumPy's booleans are no numbers for Python.
        is_number = isinstance(value, numbers.Real) or type(value).__name__ in ('bool_', 'bool')
        is_json = isinstance(value, dict | list | tuple)
        text = json.dumps(value, default=str, ensure_ascii=False) if is_json else str(value)
        return FunctionResult(_float(value) if is_number else None, text)
    # SystemExit: the function of the user ends its own call, not the process that calls it.
    except (Exception, SystemExit) as error:
        return FunctionResult(error=f'{_RAISED}{describe_exception(error)}')


def run() -> None:
    """Calls the function that the standard input names, and writes the token and the result as JSON."""
    call = json.loads(sys.stdin.read())
    os.environ.update(SINGLE_THREAD)
    # Only the result goes to the standard output. Descriptor 1 becomes the standard error, also for child processes.
    output = os.dup(1)
    os.dup2(2, 1)
    module, _, attribute = call['name'].partition(':')
    function = getattr(importlib.import_module(module), attribute)
    result = call_function(function, *call['arguments'], **call['keywords'])
    with open(output, 'w', encoding='ascii') as file:
        file.write(f'{call["token"]} {json.dumps(result)}')


def read_result(output: str, token: str) -> FunctionResult:
    """Returns the result in the standard output of `run`.

    The function may have executed text of a model, so the output is untrusted. A process that has found the token can
    write any result that this function accepts.

    Raises:
        ValueError: the output is not the token and one result whose fields have the types and values that
            `call_function` returns.
    """
    found, _, line = output.partition(' ')
    if found != token:
        raise ValueError('the output must begin with the token')
    fields = parse_json(line)
    if not isinstance(fields, list) or len(fields) != len(FunctionResult._fields):
        raise ValueError('the result must be a list of number, text and error')
    number, text, error = fields
    if type(number) not in (float, type(None)) or type(text) is not str or type(error) is not str:
        raise ValueError('the number must be a float or null, and text and error must be strings')
    if error and (number is not None or text or len(error) > MAX_ERROR or not error.isprintable()):
        raise ValueError(f'an error must be one line of at most {MAX_ERROR} printable characters, without a value')
    return FunctionResult(number, text, error)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float('inf')
