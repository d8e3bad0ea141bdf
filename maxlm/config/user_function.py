"""Functions of the user, named `package.module:function` in config keys and options."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from maxlm.errors import InputError, one_line

# Maximum length of a description of an exception.
MAX_DESCRIPTION = 1000
FUNCTION_NAME = re.compile(r'[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*')


def is_function_name(name: str) -> bool:
    """Returns True if a name has the form `package.module:function`."""
    return FUNCTION_NAME.fullmatch(name) is not None


def load_function(
    name: str, *, kind: str, arguments: tuple[str, ...] | None, keywords: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Imports a function from the working directory, PYTHONPATH or an installed package.

    Args:
        name: `package.module:function`.
        kind: use of the function in messages, e.g. `reward`.
        arguments: descriptions of the positional arguments that the function must accept; None = any arguments.
        keywords: names of the keyword arguments that it must accept.

    Raises:
        InputError: the module cannot be imported, or it has no such function with these arguments.
    """
    module_name, _, attribute = name.partition(':')
    module = _import(name, module_name, kind)
    where = f'{kind} {name}: {getattr(module, "__file__", None) or module_name}'
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, [one for one in vars(module) if not one.startswith('_')], 1)
        raise InputError(f'{where} has no {attribute!r}; {f"did you mean {near[0]!r}?" if near else "define it"}')
    function = getattr(module, attribute)
    if not callable(function):
        raise InputError(f'{where}: {attribute!r} is a {type(function).__name__}; it must be a function')
    if arguments is None:
        return function
    check_arguments(function, arguments, keywords, where=where, name=attribute)
    return function


def check_arguments(
    function: Callable[..., Any],
    arguments: tuple[str, ...],
    keywords: tuple[str, ...] = (),
    *,
    where: str,
    name: str,
) -> None:
    """Checks that a function accepts arguments; see `load_function`.

    Args:
        function: function of the user.
        arguments, keywords: see `load_function`.
        where: start of the message.
        name: name of the function in the message.

    Raises:
        InputError: it does not accept them.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        # Some functions in C have no signature.
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        raise InputError(
            f'{where}: {name}{signature} must accept the arguments ({", ".join((*arguments, *keywords))}): {error}'
        ) from error


def call_function(function: Callable[..., Any], *arguments: Any, name: str, kind: str) -> Any:
    """Returns `function(*arguments)`, in which the function `name` of the user runs.

    Raises:
        InputError: it raised an exception.
    """
    try:
        return function(*arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f'{kind} {name}: failed with {describe_exception(error)}; fix the function') from error


def module_checksum(name: str) -> str:
    """Returns the SHA-256 of the file of the function's module, '' if it has none. `load_function` must succeed."""
    path = getattr(importlib.import_module(name.partition(':')[0]), '__file__', None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ''


def describe_exception(error: BaseException) -> str:
    """Returns the type, the message and the source line of an exception in a function of the user.

    The function may have executed text of a model, so none of them is trusted. The description is one line of at most
    `MAX_DESCRIPTION` printable characters.
    """
    try:
        text = _start_of(str(error), 200)
    except (Exception, SystemExit):
        text = ''
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    at = f' at {_start_of(last.tb_frame.f_code.co_filename, 500)}:{last.tb_lineno}' if last else ''
    return f'{_start_of(str(type(error).__name__), 100)}{f": {text}" if text else ""}{at}'


def _start_of(text: str, length: int) -> str:
    """Returns the start of a text in one line. The text may be too long to escape all of it."""
    return one_line(text[:length])[:length]


def import_directory(name: str, *, kind: str) -> str | None:
    """Returns the real path of the directory from which a function's module is imported, without importing it.

    Args:
        name: `package.module:function`.
        kind: use of the function in messages, e.g. `reward`.

    Returns:
        The directory that contains the module or its outermost package; None for modules without a file.

    Raises:
        InputError: the module does not exist.
    """
    _add_working_directory()
    package = name.partition(':')[0].partition('.')[0]
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise InputError(_not_found(name, package, kind))
    paths = list(spec.submodule_search_locations or ()) or ([spec.origin] if spec.origin and spec.has_location else [])
    return os.path.dirname(os.path.realpath(paths[0])) if paths else None


def _add_working_directory() -> None:
    # The command `maxlm` does not have the working directory in sys.path, unlike `python -m maxlm`. It comes last, so
    # that its files cannot hide installed packages.
    if not {'', os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
        importlib.invalidate_caches()


def _not_found(name: str, module: str, kind: str) -> str:
    return (
        f'{kind} {name}: no module {module!r} in {os.getcwd()}, PYTHONPATH or the installed packages; start '
        'the command in the directory that contains it, or add that directory to PYTHONPATH'
    )


def _import(name: str, module_name: str, kind: str) -> ModuleType:
    _add_working_directory()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f'{missing}.'):
            raise InputError(_not_found(name, missing, kind)) from error
        raise InputError(
            f'{kind} {name}: {module_name} imports {missing!r}, which is not installed; install it'
        ) from error
    # SystemExit: the module is a script that ends the process.
    except (Exception, SystemExit) as error:
        raise InputError(
            f'{kind} {name}: the import of {module_name} failed with {describe_exception(error)}; fix the module'
        ) from error
