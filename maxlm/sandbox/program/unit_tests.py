"""Finds the tests of a program and runs them in a process that the program cannot access.

| code | counts as |
|---|---|
| a top-level `assert` | a test |
| a top-level call of a function that the tests define, as `check(add)` | a test |
| a function `test…` without required parameters | a test |
| a method `test…` of a class that is derived from `…TestCase` or named `Test…` | a test |

Other statements are setup. If one of them fails, the remaining code does not run.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import linecache
import sys
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from maxlm.sandbox.program.rpc_client import RpcClient
from maxlm.sandbox.program.rpc_protocol import Channel, Ended

FILE = 'tests.py'
# Module names under which tests may import the program.
MODULES = ('program', 'solution')
MAX_REASON = 400

Report = Callable[[list], None]


def is_test(statement: ast.stmt, functions: set[str]) -> bool:
    """Returns True if a top-level statement is a test by itself."""
    if isinstance(statement, ast.Assert):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in functions


def is_test_function(node: ast.AST) -> bool:
    """Returns True if a node is a `test…` function whose only required parameter, if any, is self."""
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith('test'):
        return False
    arguments = node.args
    needed = len(arguments.posonlyargs + arguments.args) - len(arguments.defaults)
    return needed <= any(argument.arg == 'self' for argument in arguments.args)


def is_test_class(node: ast.AST) -> bool:
    """Returns True if a node is a test class according to its name or bases."""
    if not isinstance(node, ast.ClassDef):
        return False
    bases = [base.attr if isinstance(base, ast.Attribute) else getattr(base, 'id', '') for base in node.bases]
    return node.name.startswith('Test') or any(base.endswith('TestCase') for base in bases)


def defined_functions(tree: ast.Module) -> set[str]:
    """Returns the names of top-level functions."""
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def count_tests(tree: ast.Module) -> int:
    """Counts the tests of a text without running it."""
    functions = defined_functions(tree)
    count = sum(is_test(node, functions) or is_test_function(node) for node in tree.body)
    return count + sum(is_test_function(method) for node in tree.body if is_test_class(node) for method in node.body)  # type: ignore[attr-defined]


def run_tests(text: str, channel: Channel, report: Report) -> None:
    """Runs the tests of a text and reports the results.

    Reports `['total', n]` first, then `['pass']` or `['fail', reason]` for each test. Reports `['error', reason]` if
    other code fails.
    """
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    try:
        tree = ast.parse(text, FILE)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        report(['error', f'the tests cannot be parsed: {error}'])
        return
    report(['total', count_tests(tree)])
    try:
        client = RpcClient(channel)
    except Ended:
        report(['error', 'the program exited before its tests began'])
        return
    except Exception as error:
        report(['error', f'the program sent invalid names: {error}'])
        return
    namespace = test_module(usable_names(tree, client.names))
    functions = defined_functions(tree)
    for statement in tree.body:
        code = compile(ast.Module([statement], []), FILE, 'exec')

        def execute(code=code):
            exec(code, namespace)

        reason = run_test(execute) or client.pop_refusal()
        if is_test(statement, functions):
            report(['pass'] if reason is None else ['fail', reason])
        elif reason is not None:
            report(['error', reason])
            return
    for case in defined_cases(tree, namespace):
        reason = run_test(case) or client.pop_refusal()
        report(['pass'] if reason is None else ['fail', reason])


def usable_names(tree: ast.Module, names: dict[str, Any]) -> dict[str, Any]:
    """Returns the names of the program that its tests may use.

    Standard library modules are imported by the tests, so a program cannot replace `math` in a comparison. Builtins of
    the program are ignored too, unless the tests use no other name of the program. In that case the builtin is tested.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    mentioned = used | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names = {name: value for name, value in names.items() if name.isidentifier() and not name.startswith('__')}
    builtin = {name for name in names if hasattr(builtins, name)}
    if (set(names) - builtin - sys.stdlib_module_names) & mentioned:
        names = {name: value for name, value in names.items() if name not in builtin}
    modules = {name: importlib.import_module(name) for name in set(names) & used & sys.stdlib_module_names}
    return {name: value for name, value in names.items() if name not in sys.stdlib_module_names} | modules


def test_module(names: dict[str, Any]) -> dict[str, Any]:
    """Creates the modules of the tests, including those that they may import, and returns the tests' globals."""
    for name in MODULES:
        module = types.ModuleType(name)
        module.__dict__.update(names)
        sys.modules[name] = module
    tests = types.ModuleType('__main__')
    sys.modules['__main__'] = tests
    tests.__dict__.update(names)
    return tests.__dict__


def run_test(test: Callable[[], Any]) -> str | None:
    """Runs a test and returns the reason of its failure, or None."""
    try:
        test()
    except BaseException as error:
        return failure_reason(error)
    return None


def failure_reason(error: BaseException) -> str:
    """Returns one line with the location in the tests and the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    location = f'line {frames[-1].lineno}: {frames[-1].line}: ' if frames else ''
    try:
        message = str(error)
    except BaseException:
        # The message contains an object of the program, whose methods may fail.
        message = ''
    return f'{location}{type(error).__name__}: {message}'[:MAX_REASON]


def defined_cases(tree: ast.Module, namespace: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yields the test functions and methods in the order of the text."""
    for node in tree.body:
        if is_test_function(node):
            yield namespace[node.name]  # type: ignore[attr-defined]
        elif is_test_class(node):
            kind = namespace[node.name]  # type: ignore[attr-defined]
            for name in [method.name for method in node.body if is_test_function(method)]:  # type: ignore[attr-defined]
                yield as_test(kind, name)


def as_test(kind: type, name: str) -> Callable[[], Any]:
    """Returns a function that runs one method as a test, with setup and teardown of unittest."""

    def run() -> None:
        if not issubclass(kind, unittest.TestCase):
            getattr(kind(), name)()
            return
        result = unittest.TestResult()
        unittest.TestSuite([kind(name)]).run(result)
        problems = [*result.failures, *result.errors]
        if problems:
            raise AssertionError(problems[0][1].strip().splitlines()[-1])
        if result.testsRun != 1 or not result.wasSuccessful() or result.skipped:
            raise AssertionError(f'{name} did not run')

    return run
