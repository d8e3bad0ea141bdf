"""Stand-in for the package verifiers, which has too many dependencies for the tests.

It has the names and signatures of version 0.2.1 that `maxlm.rl.environments.verifiers_adapter` and
`verifiers_environments` use, with the same order of calls in `MultiTurnEnv.rollout`.
"""

from __future__ import annotations

import inspect
import json
import types
from abc import ABC, abstractmethod


class Client(ABC):
    """Base class of clients."""

    def __init__(self, client_or_config):
        self._client = client_or_config

    @property
    def client(self):
        return self._client

    @abstractmethod
    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs): ...

    @abstractmethod
    async def close(self): ...


class Record(types.SimpleNamespace):
    """A Pydantic model."""

    def model_dump(self, *, exclude_none):
        assert exclude_none
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if calls := fields.get('tool_calls'):
            fields['tool_calls'] = [vars(call) for call in calls]
        return fields


class VerifiersError(Exception):
    """Base class of the errors that end a conversation."""


class OverlongPromptError(VerifiersError):
    """The prompt is too long for the model."""


async def _call(function, **known):
    names = inspect.signature(function).parameters
    found = function(**(known if '_' in names else {name: known[name] for name in names}))
    return await found if inspect.isawaitable(found) else found


class Rubric:
    def __init__(self, funcs, weights=None):
        self.funcs, self.weights = funcs, weights or [1.0] * len(funcs)

    async def score_rollout(self, state):
        known = {'completion': state['completion'], 'answer': state['answer'], 'state': state}
        values = [await _call(function, **known) for function in self.funcs]
        state['metrics'] = {function.__name__: value for function, value in zip(self.funcs, values, strict=True)}
        state['reward'] = sum(weight * value for weight, value in zip(self.weights, values, strict=True))

    async def cleanup(self, state):
        state['is_clean'] = True


class MultiTurnEnv:
    def __init__(self, *, dataset, rubric, max_turns=-1, tool_defs=()):
        self.dataset, self.rubric, self.max_turns, self.tool_defs = dataset, rubric, max_turns, list(tool_defs)

    def get_dataset(self):
        prompts = [[{'role': 'user', 'content': row['question']}] for row in self.dataset]
        return [{**row, 'prompt': prompt} for row, prompt in zip(self.dataset, prompts, strict=True)]

    get_eval_dataset = get_dataset

    async def no_tools_called(self, state):
        return False

    async def rollout(self, input, client, model, sampling_args=None):
        assert isinstance(client, Client)
        prompt = [Record(**message) for message in input['prompt']]
        state = {**input, 'prompt': prompt, 'trajectory': [], 'error': None}
        messages = prompt
        while True:
            if state['error'] or len(state['trajectory']) == self.max_turns or await self.no_tools_called(state):
                break
            try:
                if state['trajectory']:
                    messages = messages + [Record(**one) for one in await self.env_response(messages, state)]
                response = await client.get_response(
                    prompt=messages, model=model, tools=self.tool_defs or None, sampling_args={}, state=state
                )
            except OverlongPromptError:
                break
            except VerifiersError as error:
                state['error'] = error
                break
            messages = [*messages, response.message]
            state['trajectory'].append(response)
        state['completion'] = messages[len(prompt) :]
        return state


class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **options):
        super().__init__(max_turns=1, **options)


class ToolEnv(MultiTurnEnv):
    def __init__(self, *, tools, **options):
        self._tools = {tool.__name__: tool for tool in tools}
        parameters = {'type': 'object', 'properties': {'a': {'type': 'integer'}}}
        shown = [
            Record(name=tool.__name__, description=tool.__doc__.splitlines()[0], parameters=parameters)
            for tool in tools
        ]
        super().__init__(tool_defs=shown, **options)

    async def no_tools_called(self, state):
        return bool(state['trajectory']) and not state['trajectory'][-1].message.tool_calls

    async def env_response(self, messages, state):
        return [
            {
                'role': 'tool',
                'content': str(self._tools[call.name](**json.loads(call.arguments))),
                'tool_call_id': call.id,
            }
            for call in messages[-1].tool_calls
        ]


def message(**fields):
    """Returns a message of the model."""
    return Record(role='assistant', **fields)


def make_package(environments):
    """Returns the modules of the package by name; `environments` are those that `load_environment` finds."""
    package = types.ModuleType('verifiers')
    for one in (MultiTurnEnv, SingleTurnEnv, ToolEnv, Rubric, OverlongPromptError):
        setattr(package, one.__name__, one)
    package.load_environment = lambda name, **arguments: environments[name](**arguments)
    clients, kinds = types.ModuleType('verifiers.clients'), types.ModuleType('verifiers.types')
    clients.Client = Client
    kinds.ToolCall, kinds.ResponseMessage, kinds.Response = Record, message, Record
    return {'verifiers': package, 'verifiers.clients': clients, 'verifiers.types': kinds}
