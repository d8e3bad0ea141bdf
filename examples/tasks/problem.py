"""A problem with the answer of a teacher, and the three files that problems become."""

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
    """A question, and how a teacher answers it.

    Attributes:
        question: what the user says.
        right: an answer of the assistant that gets the full reward.
        wrong: one with the mistake that is made here; '' where there is none to make.
        task: what rewards judge answers by, keys as in maxlm/rewards/rewards.py.
    """

    question: str
    right: str
    wrong: str
    task: Mapping[str, Any]

    @property
    def user_turn(self) -> dict[str, str]:
        """The question as a message."""
        return {'role': 'user', 'content': self.question}


class Counts(NamedTuple):
    """How many chats there are, how many of them hold a mistake, and how many prompts of each kind."""

    chats: int
    mistakes: int
    prompts: int
    held_out: int


def write_problems(
    problems: Sequence[Problem], output: Path, *, num: int, held_out: int, wrong_share: float, seed: int
) -> Counts:
    """Writes CHATS, PROMPTS and HELD_OUT, with no problem in two of them; each file appears whole or not at all.

    Args:
        problems: all that there are, with different questions.
        output: directory, made if need be.
        num: problems in the chats, and as many in the prompts.
        held_out: problems that are in neither.
        wrong_share: with this probability the teacher makes the mistake where there is one to make, in the chats.
        seed: of the choice of problems and mistakes; the same seed gives the same bytes.

    Raises:
        InputError: there are not so many problems, or a file cannot be written.
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
