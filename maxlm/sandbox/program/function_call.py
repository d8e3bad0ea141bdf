"""Calls a function of the user in the process of a program."""

from __future__ import annotations

import importlib
import json
import numbers
import os
import sys
from typing import Any, NamedTuple

from maxlm.config.user_function import describe_exception

# Source text of the program; its standard input is the call as JSON.
PROGRAM = 'from maxlm.sandbox.program.function_call import run\nrun()\n'
# The number of processes of a program is limited, and all cores already run programs.
SINGLE_THREAD = dict.fromkeys(('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'), '1')


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
    except Exception as error:
        return FunctionResult(error=f'raised {describe_exception(error)}')


def run() -> None:
    """Calls the function that the standard input names, and prints the result as one line of JSON."""
    call = json.loads(sys.stdin.read())
    os.environ.update(SINGLE_THREAD)
    # Only the result goes to the standard output.
    output, sys.stdout = sys.stdout, sys.stderr
    module, _, attribute = call['name'].partition(':')
    function = getattr(importlib.import_module(module), attribute)
    result = call_function(function, *call['arguments'], **call['keywords'])
    print(f'\n{json.dumps(result)}', file=output, flush=True)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float('inf')
