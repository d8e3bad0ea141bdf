"""Writes conversations of a teacher that makes mistakes with an environment, for SFT before GRPO.

    python -m examples.demonstrations guess_number|calculator|write_function --output FILE [--conversations N]

FILE is the input of `maxlm prepare --format chat`. The environments answer the teacher as they answer the model.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

from examples.calculator import Calculator
from examples.guess_number import GuessNumber
from examples.tasks.problem import Problem
from examples.tasks.synth import make_problems
from examples.write_function import WriteFunction
from maxlm.cli.parser import ArgumentParser, number
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.storage.atomic import atomic_write

# Yields the messages of the teacher, and receives the content of the answer to each.
Teacher = Generator[dict[str, Any], Any, None]


@functools.cache
def problems() -> dict[str, Problem]:
    """Returns the problems of `WriteFunction` with their programs, by question."""
    return {problem.question: problem for problem in make_problems(0)}


def say(content: str) -> dict[str, Any]:
    """Returns a message of the teacher."""
    return {'role': 'assistant', 'content': content}


def call(content: str, expression: str) -> dict[str, Any]:
    """Returns a message with a call of the calculator."""
    function = {'name': 'calculate', 'arguments': json.dumps({'expression': expression})}
    return {**say(content), 'tool_calls': [{'id': 'call_0', 'type': 'function', 'function': function}]}


def guess_number(environment: GuessNumber, example: dict[str, Any], rng: random.Random) -> Teacher:
    """Guesses the next number in 6 of 10 turns, and the one in the middle of the possible numbers otherwise."""
    del example
    low, high = 1, environment.high
    guess, step = rng.randint(low, high), 0
    while True:
        guess = guess + step if rng.random() < 0.6 else (low + high) // 2
        if (yield say(str(guess))) == 'higher':
            low, step = guess + 1, 1
        else:
            high, step = guess - 1, -1


def calculator(environment: Calculator, example: dict[str, Any], rng: random.Random) -> Teacher:
    """Computes most expressions from left to right, and sometimes answers before the second operation.

    Each message with a call begins with the expression that is left.
    """
    del environment
    a, first, b, second, c = re.findall(r'\d+|[+*-]', example['expression'])
    is_second = second == '*' and rng.random() < 0.4
    is_early = rng.random() < 0.3
    result = yield call(example['expression'], f'{b}{second}{c}' if is_second else f'{a}{first}{b}')
    if not is_early:
        rest = f'{a}{first}{result}' if is_second else f'{result}{second}{c}'
        result = yield call(rest, rest)
    yield say(result)


def write_function(environment: WriteFunction, example: dict[str, Any], rng: random.Random) -> Teacher:
    """Writes the wrong program in 17 of 20 messages."""
    del environment
    problem = problems()[example['messages'][-1]['content']]
    while True:
        yield say(problem.wrong if rng.random() < 0.85 else problem.right)


class Kind(NamedTuple):
    """An environment, its teacher, and the maximum number of turns of the teacher."""

    environment: Callable[[], Any]
    teacher: Callable[[Any, dict[str, Any], random.Random], Teacher]
    max_turns: int


KINDS = {
    'guess_number': Kind(GuessNumber, guess_number, 4),
    'calculator': Kind(Calculator, calculator, 4),
    'write_function': Kind(WriteFunction, write_function, 2),
}


def converse(kind: Kind, example: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns a conversation between an environment and its teacher, as a line of the file."""
    environment, rng = kind.environment(), random.Random(seed)
    teacher = kind.teacher(environment, example, rng)
    messages: list[dict[str, Any]] = [*environment.reset(example, rng.getrandbits(32))]
    answer: str | None = None
    for _ in range(kind.max_turns):
        messages.append(teacher.send(answer))
        step = environment.step(messages)
        answers, _, done = asyncio.run(step) if inspect.iscoroutine(step) else step
        messages += answers
        if done:
            break
        answer = answers[-1]['content']
    # The loss ends with a message of the teacher.
    while messages[-1]['role'] != 'assistant':
        messages.pop()
    return {'messages': messages, 'tools': list(getattr(environment, 'tools', ()))}


def main(argv: list[str]) -> int:
    """Writes the file and prints the number of conversations."""
    parser = ArgumentParser(prog='examples.demonstrations', allow_abbrev=False, description=__doc__)
    parser.add_argument('environment', choices=KINDS, help='example environment')
    parser.add_argument('--output', type=Path, required=True, metavar='FILE', help='JSONL file to write')
    parser.add_argument('--conversations', type=number(1), default=4000, metavar='N', help='number (default 4000)')
    parser.add_argument('--seed', type=number(0), default=0, help='the same seed gives the same file (default 0)')
    options = parser.parse_args(argv)
    kind = KINDS[options.environment]
    environment = kind.environment()
    examples = environment.examples('train' if kind.environment is GuessNumber else 'demonstrations')
    rng = random.Random(options.seed)
    lines = [
        json.dumps(converse(kind, rng.choice(examples), rng.getrandbits(32))) for _ in range(options.conversations)
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(options.output, ''.join(f'{line}\n' for line in lines))
    print(f'wrote {options.output}: {len(lines)} conversations')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
