"""Environments of the package verifiers, with the interface of its versions 0.1.14 to 0.3.

An environment of verifiers runs the conversation itself and asks a client for the turns of the model. The adapter runs
it in an event loop that all conversations share, because its clients and locks belong to one loop. The client waits for
the turn that the rollout generates.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any, ClassVar

from maxlm.config.user_function import call_function
from maxlm.data.documents.messages import Message
from maxlm.errors import InputError
from maxlm.rl.environments.protocol import Environment, EnvironmentStep, Trajectory

PREFIX = 'verifiers:'
# Not an extra of maxlm, because its 100 dependencies would be in the lock file. Version 0.4 has another interface.
INSTALL = "pip install 'verifiers>=0.1.14,<0.4'"
# Name of the total reward among the scores.
REWARD = 'reward'


def load_verifiers(name: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that creates an adapter of the environment `verifiers:NAME`.

    Args:
        name: `verifiers:` and the name of an installed environment.
        arguments: arguments of its `load_environment`.

    Raises:
        InputError: verifiers is not installed, has another interface, or cannot load the environment.
    """
    package = _import()
    loaded = call_function(
        lambda: package.load_environment(name.removeprefix(PREFIX), **arguments), name=name, kind='environment'
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name='verifiers', daemon=True).start()
    return functools.partial(VerifiersEnvironment, package, loaded, loop)


def _import() -> ModuleType:
    try:
        package = importlib.import_module('verifiers')
    except ImportError as error:
        raise InputError(
            f'grpo.environment={PREFIX}…: the package verifiers cannot be imported ({error}); run: {INSTALL}'
        ) from error
    if not hasattr(package, 'load_environment'):
        raise InputError(
            f'grpo.environment={PREFIX}…: verifiers {getattr(package, "__version__", "")} has no load_environment; '
            f'run: {INSTALL}'
        )
    return package


class VerifiersEnvironment:
    """One conversation with an environment of verifiers; see `Environment`.

    The reward is that of its rubric. Its metrics, among them each reward function, have no weight of their own.
    """

    weights: ClassVar = {REWARD: 1.0}

    def __init__(self, package: ModuleType, environment: Any, loop: asyncio.AbstractEventLoop):
        """
        Args:
            package: the package verifiers.
            environment: environment of verifiers, which all conversations share.
            loop: running event loop.
        """
        self._package, self._environment, self._loop = package, environment, loop
        # Requests of the environment, and None at its end.
        self._requests: queue.Queue[Sequence[Any] | None] = queue.Queue()
        self._turns: asyncio.Queue[tuple[Message, bool] | None] = asyncio.Queue()
        self._rollout: Future[Any] | None = None
        self._known: list[dict[str, Any]] = []
        self._num_given = 0
        self.tools: list[dict[str, Any]] = []

    def examples(self, split: str) -> list[dict[str, Any]]:
        """Returns the rows of the environment's data set."""
        found = self._environment
        dataset = found.get_dataset() if split == 'train' else found.get_eval_dataset()
        return [dict(row) for row in dataset]

    def reset(self, example: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        """See `Environment`. An environment of verifiers has no seed."""
        del seed
        self._rollout = asyncio.run_coroutine_threadsafe(self._run({'example_id': 0, **example}), self._loop)
        self._rollout.add_done_callback(lambda _: self._requests.put(None))
        messages = self._next_messages()
        if messages is None:
            self._rollout.result()
            raise ValueError('the environment asked for no turn of the model; use one that does')
        return messages

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        """See `Environment`."""
        self._give(messages, is_complete=True)
        found = self._next_messages()
        return EnvironmentStep(found or [], 0.0, found is None)

    def score(self, trajectory: Trajectory) -> dict[str, float]:
        """See `Environment`."""
        assert self._rollout is not None, 'reset was called'
        if len(trajectory.messages) > self._num_given and trajectory.messages[-1]['role'] == 'assistant':
            self._give(trajectory.messages, is_complete=False)
        if not self._rollout.done():
            self._put(None)
        state = self._rollout.result()
        if (error := state.get('error')) is not None:
            raise RuntimeError(f'{type(error).__name__}: {error}')
        metrics = {name: float(value) for name, value in (state.get('metrics') or {}).items()}
        return {**metrics, REWARD: float(state[REWARD])}

    def close(self) -> None:
        """See `Environment`."""
        if self._rollout is not None:
            self._rollout.cancel()

    async def _run(self, row: Mapping[str, Any]) -> Any:
        client = _client_class(self._package)(self)
        state = await self._environment.rollout(dict(row), client, 'maxlm', {})
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        return state

    def _put(self, turn: tuple[Message, bool] | None) -> None:
        self._loop.call_soon_threadsafe(self._turns.put_nowait, turn)

    def _give(self, messages: Sequence[Message], *, is_complete: bool) -> None:
        self._num_given = len(messages)
        self._put((messages[-1], is_complete))

    def _next_messages(self) -> list[dict[str, Any]] | None:
        """Returns the new messages of the next request; None at the end of the conversation.

        Raises:
            ValueError: the environment changed earlier messages.
        """
        prompt = self._requests.get()
        if prompt is None:
            return None
        found = [_as_dict(message) for message in prompt]
        earlier = found[: len(self._known)]
        if [_compared(message) for message in earlier] != [_compared(message) for message in self._known]:
            raise ValueError('the environment changed earlier messages; use one that only adds messages')
        new = found[len(self._known) + bool(self._known) :]
        self._known = found
        return new

    async def answer(self, prompt: Sequence[Any], tools: Sequence[Any] | None) -> tuple[Message, bool] | None:
        """Returns the next turn of the model and True if it is complete; None if a limit ended the conversation.

        Args:
            prompt: all messages so far.
            tools: descriptions of the tools in the form of verifiers.
        """
        self.tools = [
            {
                'type': 'function',
                'function': {'name': tool.name, 'description': tool.description, 'parameters': dict(tool.parameters)},
            }
            for tool in tools or ()
        ]
        self._requests.put(list(prompt))
        return await self._turns.get()


def _as_dict(message: Any) -> dict[str, Any]:
    """Returns a message of verifiers, a Pydantic model, in the form of OpenAI's API."""
    fields = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    kept = {name: fields[name] for name in ('role', 'content', 'name', 'tool_call_id') if fields.get(name) is not None}
    calls = [
        {'id': call['id'], 'type': 'function', 'function': {'name': call['name'], 'arguments': call['arguments']}}
        for call in fields.get('tool_calls') or ()
    ]
    return {**kept, **({'tool_calls': calls} if calls else {})}


def _compared(message: Mapping[str, Any]) -> tuple[Any, Any]:
    return message['role'], message.get('content')


@functools.cache
def _client_class(package: ModuleType) -> type:
    """Returns a client class of verifiers whose turns are those of a `VerifiersEnvironment`."""
    base = importlib.import_module(f'{package.__name__}.clients').Client
    types = importlib.import_module(f'{package.__name__}.types')

    async def get_response(client: Any, prompt: Any, model: str, tools: Any = None, **_: Any) -> Any:
        turn = await client.client.answer(prompt, tools)
        if turn is None:
            raise package.OverlongPromptError('the conversation has reached a limit of the rollout')
        message, is_complete = turn
        calls = [
            types.ToolCall(id=call['id'], name=call['function']['name'], arguments=call['function']['arguments'])
            for call in message.get('tool_calls') or ()
        ]
        answer = types.ResponseMessage(
            content=message['content'],
            tool_calls=calls or None,
            finish_reason='length' if not is_complete else 'tool_calls' if calls else 'stop',
            is_truncated=not is_complete,
        )
        return types.Response(id='', created=int(time.time()), model=model, message=answer)

    # The abstract methods convert requests and responses for a server, which this client does not use.
    unused = dict.fromkeys(base.__abstractmethods__, get_response)
    return type('RolloutClient', (base,), {**unused, 'get_response': get_response})
