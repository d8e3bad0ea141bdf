"""Protocol of environments: they open conversations, answer the turns of the model, and score the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from maxlm.data.documents.messages import Message


class EnvironmentStep(NamedTuple):
    """Answer of an environment to a turn of the model. A plain tuple of the same three values works too.

    Attributes:
        messages: messages after the turn, with the roles `user`, `tool`, `system` or `developer`. They may be empty if
            `done` is True.
        reward: reward of the turn, a number from -1e9 to 1e9.
        done: True if the conversation has ended.
    """

    messages: Sequence[Message]
    reward: float
    done: bool


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A complete conversation between an environment and the model.

    Attributes:
        example: the line of the prompts file.
        seed: seed of `reset`, 0 … 2³² - 1.
        messages: all messages, from those of `reset` on.
        rewards: reward of each call of `step`.
        done: True if the environment ended the conversation, False if a limit did.
    """

    example: Mapping[str, Any]
    seed: int
    messages: tuple[Message, ...]
    rewards: tuple[float, ...]
    done: bool


class Environment(Protocol):
    """A class of the user, named in `grpo.environment`. Each conversation has its own instance.

    The constructor is called with `grpo.environment_args`. All methods may be plain or `async`. The calls of one
    conversation run in turn, those of different conversations at the same time, each in a thread with an event loop of
    the conversation.

    These attributes and methods are optional:

    - `tools`: JSON descriptions of functions in the form of OpenAI's API, for the chat template. With them, turns are
      parsed for calls, which are in `tool_calls` of the message. It is read after `reset`.
    - `weights`: weight of each name of `score`. Names that it lacks are metrics without weight. Without `weights`, each
      name has weight 1.
    - `examples(split)`: examples for training (`'train'`) or evaluations (`'eval'`), used without a file of prompts.
    - `close()`: called at the end of the conversation, also after a failure.
    """

    def reset(self, example: Mapping[str, Any], seed: int) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Returns the first messages, the last of which the model answers.

        All conversations of a group have the same example and seed, and must have the same first messages.
        """

    def step(self, messages: Sequence[Message]) -> EnvironmentStep | Awaitable[EnvironmentStep]:
        """Returns the answer to `messages[-1]`, the turn of the model; `messages` are all messages so far."""

    def score(self, trajectory: Trajectory) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Returns rewards by name. The reward of the conversation is their weighted sum plus those of all steps."""
