"""Loads the environment of a config and checks its methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.config.user_function import call_function, check_arguments, load_function
from maxlm.data.formats.jsonl import read_objects
from maxlm.errors import InputError
from maxlm.rl.environments.calls import ConversationLoop, EnvironmentCall, EnvironmentCaller
from maxlm.rl.environments.protocol import Environment
from maxlm.rl.environments.verifiers_adapter import PREFIX, load_verifiers
from maxlm.storage.filesystem import display_path
from maxlm.storage.json_text import parse_json, to_json

KIND = 'environment'
# Methods of an environment, and descriptions of their arguments.
METHODS = {'reset': ('example', 'seed'), 'step': ('messages',), 'score': ('trajectory',)}
OPTIONAL_METHODS = {'examples': ('split',), 'close': ()}
# Time limit of `close` before training.
CLOSE_SECONDS = 10.0


def load_environment(grpo: GrpoConfig) -> Callable[[], Environment]:
    """Returns a function that creates an environment of the config. It has been called once.

    Raises:
        InputError: the class cannot be imported or created with the arguments, or lacks a method with its arguments.
    """
    name, arguments = grpo.environment, parse_json(grpo.environment_args or '{}')
    if name.startswith(PREFIX):
        return load_verifiers(name, arguments)
    found = load_function(name, kind=KIND, arguments=None)

    def create() -> Environment:
        return call_function(lambda: found(**arguments), name=name, kind=KIND)

    check_arguments(found, (), tuple(arguments), where=f'{KIND} {name}', name=name.partition(':')[2])
    with _opened(create) as (environment, _):
        for method, names in {**METHODS, **OPTIONAL_METHODS}.items():
            value = getattr(environment, method, None)
            if value is None and method in OPTIONAL_METHODS:
                continue
            if not callable(value):
                raise InputError(
                    f'{KIND} {name}: {type(environment).__name__} has no method {method}({", ".join(names)}); define it'
                )
            check_arguments(value, names, where=f'{KIND} {name}', name=method)
    return create


def read_examples(
    path: str, create: Callable[[], Environment], *, split: str, key: str
) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Returns the examples of a JSONL file, or without a file those of the environment, and their line numbers.

    Args:
        path: path or URL of the file; '' = none.
        create: creates an environment.
        split: `train` or `eval`.
        key: config key of the file for messages.

    Raises:
        InputError: the file cannot be read, the environment has no examples, or an example is not an object.
    """
    if path:
        lines = list(read_objects(path))
        if not lines:
            raise InputError(f'{display_path(path)}: no examples found; add lines with JSON objects')
        return [example for _, example in lines], [number for number, _ in lines]
    with _opened(create) as (environment, loop):
        method = getattr(environment, 'examples', None)
        if method is None:
            raise InputError(
                f"{key}='' and the environment has no method examples(split); set {key} to a JSONL file, or define it"
            )
        where = f'{KIND} {type(environment).__name__}'
        found = call_function(
            lambda: list(loop.result(method(split))), name=f'{type(environment).__name__}.examples', kind=KIND
        )
    for index, example in enumerate(found):
        try:
            if not isinstance(example, Mapping):
                raise TypeError(f'it is a {type(example).__name__}')
            found[index] = parse_json(to_json(dict(example)))
        except (TypeError, ValueError) as error:
            raise InputError(
                f'{where}: examples({split!r})[{index}] is not an object that JSON can express: {error}; use a dict'
            ) from error
    if not found:
        raise InputError(f'{where}: examples({split!r}) returned none; return at least one')
    return found, list(range(1, len(found) + 1))


@contextlib.contextmanager
def _opened(create: Callable[[], Environment]) -> Iterator[tuple[Environment, ConversationLoop]]:
    """Context with an environment and its event loop, which it closes as at the end of a conversation."""
    environment, loop = create(), ConversationLoop()
    try:
        yield environment, loop
    finally:
        if callable(close := getattr(environment, 'close', None)):
            EnvironmentCaller(CLOSE_SECONDS)([EnvironmentCall(loop, close)])
        loop.close()
