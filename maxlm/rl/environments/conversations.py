"""Conversations of a rollout with environments. A conversation whose environment misbehaves has failed.

A failure is an exception, a call without result within the time limit, or a value of another form than in
`maxlm.rl.environments.protocol`. It ends this conversation only, which is not used for training.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.data.documents.messages import Message, normalize_message
from maxlm.data.documents.tools import parse_tools
from maxlm.rl.environments.calls import CallFailure, ConversationLoop, EnvironmentCall, EnvironmentCaller
from maxlm.rl.environments.protocol import Environment, Trajectory
from maxlm.rl.rewards.rewards import MAX_REWARD
from maxlm.storage.json_text import parse_json, to_json

# Maximum number of characters in the messages of one call.
MAX_CHARACTERS = 10**6
MAX_SCORES = 100
# Name of the sum of the rewards of steps among the scores.
STEP_REWARDS = 'step_rewards'
SCORE_NAME = re.compile(r'[\w.:/ -]{1,100}')


class _ViolationError(ValueError):
    """A value of an environment has the wrong form; the message is the rest of a sentence about the method."""


class SeededExample(NamedTuple):
    """Arguments of `Environment.reset`."""

    example: Mapping[str, Any]
    seed: int


class _Conversation:
    """State of one conversation."""

    def __init__(self, start: SeededExample):
        self.start = start
        self.loop = ConversationLoop()
        self.environment: Environment | None = None
        self.messages: list[Message] = []
        self.tools: list[Any] = []
        self.rewards: list[float] = []
        self.is_done = False
        self.failure = ''


class Conversations:
    """Conversations of a rollout. Results are values that JSON can express."""

    def __init__(
        self, create: Callable[[], Environment], starts: Sequence[SeededExample], *, seconds: float, max_turns: int
    ):
        """
        Args:
            create: creates an environment.
            starts: example and seed of each conversation.
            seconds: time limit of each call of a method.
            max_turns: maximum number of turns of the model.
        """
        self._create, self._max_turns = create, max_turns
        self._caller = EnvironmentCaller(seconds)
        self._all = [_Conversation(start) for start in starts]
        # A run may end while another thread still creates environments.
        self._is_ended, self._ending = False, threading.Lock()

    def open(self) -> list[dict[str, Any]]:
        """Returns the first `messages` and the `tools` of each conversation, or its `failure`."""
        running = [one for one in self._all if not one.failure]
        for one, created in self._call('the constructor', running, lambda one: (self._create, ())):
            one.environment = created
        if self._is_ended:
            self.end()
            for index in range(len(self._all)):
                self.fail(index, 'the run has ended')
        running = [one for one in self._all if not one.failure]
        for one, messages in self._call('reset', running, lambda one: (one.environment.reset, tuple(one.start))):
            with self._checking(one, 'reset'):
                one.messages = _messages(messages)
                if not one.messages or one.messages[-1]['role'] == 'assistant':
                    raise _ViolationError('returned no message for the model to answer')
        running = [one for one in running if not one.failure]
        for one, tools in self._call('tools', running, lambda one: (getattr, (one.environment, 'tools', ()))):
            with self._checking(one, 'tools'):
                one.tools = parse_tools(_json(list(tools or ())))
        return [
            {'failure': one.failure} if one.failure else {'messages': [*one.messages], 'tools': one.tools}
            for one in self._all
        ]

    def step(self, turns: Mapping[int, Message]) -> dict[int, list[Message] | str | None]:
        """Calls `step` after turns of the model.

        Args:
            turns: message of the model by index of the conversation.

        Returns:
            The next messages of each conversation; None if it has ended, and the reason if it has failed.
        """
        found = {index: self._all[index] for index in turns}
        for index, one in found.items():
            one.messages.append(turns[index])
        answers: dict[int, list[Message]] = {}
        for one, answer in self._call(
            'step', list(found.values()), lambda one: (one.environment.step, (copy.deepcopy(one.messages),))
        ):
            with self._checking(one, 'step'):
                messages, reward, one.is_done = _answer(answer)
                one.rewards.append(reward)
                one.messages += messages
                answers[id(one)] = messages
        return {
            index: one.failure or (None if one.is_done or len(one.rewards) >= self._max_turns else answers[id(one)])
            for index, one in found.items()
        }

    def fail(self, index: int, reason: str) -> None:
        """Marks a conversation as failed, unless it already is. `reason` is a complete sentence."""
        self._all[index].failure = self._all[index].failure or reason

    def close(self, turns: Mapping[int, Message]) -> list[dict[str, Any]]:
        """Scores and closes all conversations.

        Args:
            turns: unfinished turn of the model by index of the conversation.

        Returns:
            The `reward`, the `scores` and the names of the weights without a score of each conversation, or its
            `failure`.
        """
        for index, message in turns.items():
            self._all[index].messages.append(message)
        running = [one for one in self._all if not one.failure]
        scores: dict[int, dict[str, float]] = {}
        for one, found in self._call('score', running, lambda one: (one.environment.score, (_trajectory(one),))):
            with self._checking(one, 'score'):
                scores[id(one)] = _scores(found)
        running, totals = [one for one in running if not one.failure], {}
        unused: dict[int, list[str]] = {}
        for one, weights in self._call('weights', running, lambda one: (getattr, (one.environment, 'weights', None))):
            with self._checking(one, 'weights'):
                values = scores[id(one)]
                given = dict.fromkeys(values, 1.0) if weights is None else _scores(weights)
                weighted = sum(given.get(name, 0.0) * value for name, value in values.items())
                unused[id(one)] = [name for name in given if name not in values]
                totals[id(one)] = _number(weighted + sum(one.rewards), 'has a sum of rewards')
        self.end()
        return [
            {'failure': one.failure}
            if one.failure
            else {
                'reward': totals[id(one)],
                'scores': {**scores[id(one)], STEP_REWARDS: float(sum(one.rewards))},
                'unused_weights': unused[id(one)],
            }
            for one in self._all
        ]

    def end(self) -> None:
        """Closes all environments, also those of conversations that have not ended. A second call has no effect."""
        self._is_ended = True
        with self._ending:
            opened = [(one, one.environment) for one in self._all if one.environment is not None]
            for one, _ in opened:
                one.environment = None
        closers = [(one, close) for one, each in opened if callable(close := getattr(each, 'close', None))]
        # The result does not matter: the conversation has ended.
        self._caller([EnvironmentCall(one.loop, close) for one, close in closers])
        for one in self._all:
            one.loop.close()

    def _call(
        self,
        name: str,
        conversations: Sequence[_Conversation],
        call_of: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]],
    ) -> list[tuple[_Conversation, Any]]:
        """Calls a method of each conversation, and returns the results of those without failure."""
        results = self._caller([EnvironmentCall(one.loop, *call_of(one)) for one in conversations])
        for one, result in zip(conversations, results, strict=True):
            if isinstance(result, CallFailure):
                one.failure = f'{name} {result.reason}'
        return [(one, result) for one, result in zip(conversations, results, strict=True) if not one.failure]

    @contextlib.contextmanager
    def _checking(self, one: _Conversation, name: str) -> Any:
        try:
            yield
        # Values of the user may raise anything when they are converted.
        except Exception as error:
            one.failure = f'{name} {error if isinstance(error, _ViolationError) else f"returned a bad value: {error}"}'


def _trajectory(one: _Conversation) -> Trajectory:
    return Trajectory(
        copy.deepcopy(one.start.example),
        one.start.seed,
        tuple(copy.deepcopy(one.messages)),
        tuple(one.rewards),
        one.is_done,
    )


def _json(value: Any) -> Any:
    """Returns a copy of a value that consists of JSON values. Raises ValueError if it does not."""
    text = to_json(value)
    if len(text) > MAX_CHARACTERS:
        raise _ViolationError(f'returned {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed')
    return parse_json(text)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _ViolationError(f'returned a {type(value).__name__} as messages; return a list of messages')
    length = 0
    for message in value:
        if not isinstance(message, Mapping):
            raise _ViolationError(f'returned a {type(message).__name__} as a message; return a dict with role, content')
        content = message.get('content')
        length += len(content) if isinstance(content, str) else 0
    if length > MAX_CHARACTERS:
        raise _ViolationError(f'returned {length:,} characters; at most {MAX_CHARACTERS:,} are allowed')
    return [normalize_message(message) for message in _json([dict(message) for message in value])]


def _answer(value: Any) -> tuple[list[Message], float, bool]:
    if not isinstance(value, tuple) or len(value) != 3:
        raise _ViolationError(f'returned a {type(value).__name__}; return (messages, reward, done)')
    messages, reward, done = _messages(value[0]), _number(value[1], 'returned the reward'), value[2]
    if type(done).__name__ not in ('bool', 'bool_'):
        raise _ViolationError(f'returned a {type(done).__name__} as done; return True or False')
    if any(message['role'] == 'assistant' for message in messages):
        raise _ViolationError('returned a message of the assistant; only the model writes them')
    if not messages and not done:
        raise _ViolationError('returned no messages although the conversation goes on; return one, or done=True')
    return messages, reward, bool(done)


def _number(value: Any, what: str) -> float:
    if isinstance(value, str | bytes) or value is None:
        raise _ViolationError(f'{what} {value!r:.80}; it must be a number')
    number = float(value)
    if not -MAX_REWARD <= number <= MAX_REWARD:
        raise _ViolationError(f'{what} {number}; it must be from -1e9 to 1e9')
    return number


def _scores(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_SCORES:
        raise _ViolationError(f'returned a {type(value).__name__}; return a dict of at most {MAX_SCORES} rewards')
    for name in value:
        if not isinstance(name, str) or not SCORE_NAME.fullmatch(name) or name == STEP_REWARDS:
            raise _ViolationError(f'has the name {name!r:.80}; use another one, of letters and digits')
    return {name: _number(number, f'has {name} =') for name, number in value.items()}
