"""Tools that the model may call: functions of the user, named `package.module:function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from maxlm.config.user_function import load_function
from maxlm.errors import InputError
from maxlm.sandbox.functions import FunctionCall, FunctionPool, UserFunction
from maxlm.sandbox.program.function_call import FunctionResult, call_function
from maxlm.sandbox.program.function_schema import tool_schema
from maxlm.storage.json_text import parse_json

SCHEMA = f'{tool_schema.__module__}:{tool_schema.__name__}'


class ToolResult(NamedTuple):
    """Result of a call: the text for the model, which starts with `error: ` if the call failed."""

    text: str
    is_error: bool = False


def tool_function(name: str) -> UserFunction:
    """Returns the tool `package.module:function` for `FunctionPool`."""
    return UserFunction(name, 'tool')


class Tools:
    """Tools of a run.

    Attributes:
        schemas: description of each tool in the form of OpenAI's API, for the chat template.
    """

    def __init__(self, names: Sequence[str], functions: FunctionPool | None = None):
        """Imports the tools, or uses `functions`, which must contain them.

        Raises:
            InputError: a tool cannot be imported, its docstring or type hints do not describe it, or two have the same
                name.
        """
        self._functions = functions
        self._loaded = {} if functions else {name: load_function(**tool_function(name)._asdict()) for name in names}
        self._names = {name.partition(':')[2]: name for name in names}
        if len(self._names) < len(names):
            raise InputError(f'tools {", ".join(names)}: two functions have the same name; rename one')
        calls = [FunctionCall(SCHEMA, (name,)) for name in names]
        results = functions.call(calls) if functions else [call_function(tool_schema, name) for name in names]
        self.schemas: list[dict[str, Any]] = []
        for name, result in zip(names, results, strict=True):
            try:
                self.schemas.append(parse_json(result.text))
            except ValueError:
                raise InputError(f'tool {name}: {result.error or result.text}; fix the function') from None

    def run(self, calls: Sequence[tuple[str, str]]) -> list[ToolResult]:
        """Runs calls, each a function name and its arguments as JSON. A failed call has a result for the model."""
        results: dict[int, FunctionResult] = {}
        valid: dict[int, FunctionCall] = {}
        for index, (name, text) in enumerate(calls):
            arguments = parse_json(text)
            if name not in self._names:
                results[index] = FunctionResult(error=f'no tool {name!r}; use one of: {", ".join(self._names)}')
            elif not isinstance(arguments, dict):
                results[index] = FunctionResult(error='the arguments must be a JSON object')
            else:
                valid[index] = FunctionCall(self._names[name], keywords=arguments)
        if self._functions:
            results |= zip(valid, self._functions.call(list(valid.values())), strict=True)
        else:
            results |= {index: call_function(self._loaded[call.name], **call.keywords) for index, call in valid.items()}
        return [_tool_result(results[index]) for index in range(len(calls))]


def _tool_result(result: FunctionResult) -> ToolResult:
    problem = result.error
    if problem.startswith('raised '):
        # The location of an exception differs between machines.
        problem = problem.removeprefix('raised ').rpartition(' at ')[0]
    text = f'error: {problem}' if problem else result.text
    # Unpaired surrogates cannot be tokenized.
    return ToolResult(text.encode(errors='replace').decode(), bool(problem))
