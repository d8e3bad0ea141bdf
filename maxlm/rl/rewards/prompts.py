"""Prompts for reinforcement learning: reads token ids and tasks from JSONL files, and defines an endless order.

    {"prompt": "What is 6 · 7?", "answer": "42"}
    {"messages": [{"role": "user", "content": "Write f(x) …"}], "tests": ["assert f(2) == 4"]}

Messages are rendered with the chat template of the model. With a chat template, a `prompt` is one turn of the user;
otherwise it is a text that the model continues. The other keys are for rewards; see `maxlm.rl.rewards.rewards`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.documents.messages import parse_messages, text_or_messages
from maxlm.data.documents.null_fields import present_fields
from maxlm.data.documents.tools import TOOLS, tools_of
from maxlm.data.formats.jsonl import read_objects
from maxlm.data.loader.shuffle import ShuffledIndex
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.storage.filesystem import display_path
from maxlm.workdir.files import CHAT_TEMPLATE, TOKENIZER

# Keys of the prompt; a line has exactly one of them.
PROMPT_KEYS = ('prompt', 'messages')


class Prompts(NamedTuple):
    """Prompts of a file, in the order of the file.

    Attributes:
        path: path or URL of the file.
        ids: token ids of each prompt, uint32 [number of tokens]; empty for examples of an environment.
        tasks: the line of each prompt, with all its keys.
        lines: line number of each prompt, counted from 1.
        num_dropped: number of prompts that were too long.
    """

    path: str
    ids: tuple[np.ndarray, ...]
    tasks: tuple[Mapping[str, Any], ...]
    lines: tuple[int, ...]
    num_dropped: int

    @property
    def num_prompts(self) -> int:
        """Returns the number of prompts."""
        return len(self.ids)

    @property
    def longest(self) -> int:
        """Returns the number of tokens of the longest prompt."""
        return max(map(len, self.ids))

    @property
    def fingerprint(self) -> str:
        """Returns the SHA-256 of ids and tasks in order, which does not depend on the path of the file."""
        digest = hashlib.sha256()
        for ids, task in zip(self.ids, self.tasks, strict=True):
            # The ids determine the prompt, except for examples of an environment.
            fields = {key: value for key, value in task.items() if not len(ids) or key not in (*PROMPT_KEYS, TOOLS)}
            digest.update(json.dumps([ids.tolist(), fields], sort_keys=True).encode() + b'\n')
        return digest.hexdigest()

    def location(self, index: int) -> str:
        """Returns `FILE:LINE` of a prompt for messages."""
        return f'{display_path(self.path)}:{self.lines[index]}'

    def location_of(self, task: Mapping[str, Any]) -> str:
        """Returns `FILE:LINE` of one of `tasks` for messages."""
        return self.location(next(index for index, one in enumerate(self.tasks) if one is task))

    def indices(self, rollout: int, num_prompts: int, seed: int) -> list[int]:
        """Returns the indices of the prompts of a rollout.

        Rollouts are consecutive ranges of an endless order, in which each epoch is another permutation of all prompts.
        The result depends only on the arguments and the number of prompts, so a run can resume anywhere without state.
        A rollout across the end of an epoch may contain a prompt twice.

        Args:
            rollout: number of the rollout, counted from 0.
            num_prompts: number of prompts in each rollout.
            seed: 0 … 2³² - 1.
        """
        order = ShuffledIndex([self.num_prompts], seed=seed)
        return [order[position] for position in range(rollout * num_prompts, (rollout + 1) * num_prompts)]


def load_encoder(workdir: Path) -> ChatEncoder | Tokenizer:
    """Loads the prompt encoder of a workdir: its chat template, or its tokenizer if it has no chat template.

    Raises:
        InputError: the tokenizer is missing, or the tokenizer or chat template is damaged.
    """
    if (workdir / CHAT_TEMPLATE).is_file():
        return ChatEncoder.load(workdir)
    return Tokenizer.load(workdir / TOKENIZER)


def read_prompts(
    path: str, encoder: ChatEncoder | Tokenizer, max_tokens: int, *, tools: Sequence[Mapping[str, Any]] = ()
) -> Prompts:
    """Reads prompts from a JSONL file, local or in a bucket, plain or compressed with gzip or Zstandard.

    Prompts of more than `max_tokens` tokens are dropped with one warning. `tools` are added to those of each prompt.

    Raises:
        InputError: the file cannot be read, a line is not a prompt, or no prompt is short enough. The message names the
            line.
    """
    name = display_path(path)
    ids, tasks, lines, too_long = [], [], [], []
    for number, entry in read_objects(path):
        try:
            prompt = _encode(entry, encoder, tools)
        except (ValueError, InputError) as error:
            raise InputError(f'{name}:{number}: {error}') from error
        if len(prompt) > max_tokens:
            too_long.append((len(prompt), number))
            continue
        ids.append(prompt)
        tasks.append(entry)
        lines.append(number)
    if not ids and not too_long:
        raise InputError(f'{name}: no prompts found; add lines with "prompt" or "messages"')
    if not ids:
        length, number = min(too_long)
        raise InputError(
            f'{name}: every prompt has more than {max_tokens} tokens (data.seq_len - grpo.max_completion_length); the '
            f'shortest has {length} (line {number}); shorten the prompts or increase data.seq_len'
        )
    if too_long:
        logger.warning(
            f'{name}: skipping {len(too_long)} of {len(ids) + len(too_long)} prompts that have more than '
            f'{max_tokens} tokens; the first is line {too_long[0][1]}, with {too_long[0][0]} tokens'
        )
    return Prompts(path, tuple(ids), tuple(tasks), tuple(lines), len(too_long))


def _encode(
    entry: Mapping[str, Any], encoder: ChatEncoder | Tokenizer, more_tools: Sequence[Mapping[str, Any]]
) -> np.ndarray:
    """Returns the ids of a prompt, uint32 [number of tokens]. ValueError or InputError if the entry is not a prompt."""
    entry = present_fields(entry)
    present = [key for key in PROMPT_KEYS if key in entry]
    if len(present) != 1:
        raise ValueError(f'must have either "prompt" or "messages"; found {", ".join(entry) or "nothing"}')
    (key,) = present
    text = text_or_messages(entry[key])
    if key == 'prompt' and isinstance(text, str):
        if not text:
            raise ValueError('"prompt" is empty; it must contain text')
        if isinstance(encoder, Tokenizer):
            (ids,) = encoder.encode_batch([text])
            if not len(ids):
                raise ValueError('the prompt has no tokens; it must contain text')
            return np.concatenate([np.array(encoder.beginning_of_document, ids.dtype), ids])
        messages = [{'role': 'user', 'content': text}]
    else:
        messages = parse_messages(text, key)
    if isinstance(encoder, Tokenizer):
        raise ValueError(
            'the prompt consists of messages, but the model has no chat template; start from a model trained on '
            'conversations, or use a string as "prompt"'
        )
    if not messages or messages[-1]['role'] == 'assistant':
        raise ValueError(f'{key!r} must end with a message for the assistant to answer')
    return encoder.encode_prompt(messages, tools=[*tools_of(entry), *more_tools])
