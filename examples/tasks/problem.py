"""A problem with a teacher's answers, and the files of chats and prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import atomic_write

CHATS, PROMPTS, HELD_OUT = 'chats.jsonl', 'prompts.jsonl', 'held_out.jsonl'


class Problem(NamedTuple):
    """A question with a right and a wrong answer.

    Attributes:
        question: user message.
        right: assistant answer that gets the full reward.
        wrong: assistant answer with a typical mistake; '' if this problem allows no mistake.
        task: fields that the reward functions use, with the keys of maxlm/rl/rewards/rewards.py.
    """

    question: str
    right: str
    wrong: str
    task: Mapping[str, Any]

    @property
    def user_turn(self) -> dict[str, str]:
        """Returns the question as a chat message."""
        return {'role': 'user', 'content': self.question}


class Counts(NamedTuple):
    """Number of chats, of chats with a mistake, of prompts and of held-out prompts."""

    chats: int
    mistakes: int
    prompts: int
    held_out: int


def write_problems(
    problems: Sequence[Problem], output: Path, *, num: int, held_out: int, wrong_share: float, seed: int
) -> Counts:
    """Atomically writes CHATS, PROMPTS and HELD_OUT. No problem is in more than one file.

    Args:
        problems: all problems, with distinct questions.
        output: directory; it is created if necessary.
        num: number of chats, and of prompts.
        held_out: number of held-out prompts.
        wrong_share: probability of the wrong answer in a chat, for problems that have one.
        seed: seed for choosing problems and mistakes; the same seed gives the same bytes.

    Raises:
        InputError: there are too few problems, or a file cannot be written.
    """
    if 2 * num + held_out > len(problems):
        raise InputError(
            f'--problems={num} with --held-out={held_out} needs {2 * num + held_out} problems, and there are '
            f'{len(problems)}; give --problems={max(0, len(problems) - held_out) // 2} or fewer, or hold out fewer'
        )
    rng = random.Random(seed)
    chosen = rng.sample(problems, 2 * num + held_out)
    answers = [
        problem.wrong if problem.wrong and rng.random() < wrong_share else problem.right for problem in chosen[:num]
    ]
    chats = [
        {'messages': [problem.user_turn, {'role': 'assistant', 'content': answer}]}
        for problem, answer in zip(chosen[:num], answers, strict=True)
    ]
    prompts = [{'messages': [problem.user_turn], **problem.task} for problem in chosen[num:]]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f'--output={output}: {os_message(error)}; give a directory that can be written') from error
    for name, entries in ((CHATS, chats), (PROMPTS, prompts[:num]), (HELD_OUT, prompts[num:])):
        lines = (json.dumps(entry, ensure_ascii=False) + '\n' for entry in entries)
        atomic_write(output / name, ''.join(lines))
    mistakes = sum(answer != problem.right for problem, answer in zip(chosen, answers, strict=False))
    return Counts(num, mistakes, num, held_out)
