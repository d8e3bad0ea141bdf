"""Environment for GRPO in which the model computes an expression with several calls of a calculator.

    maxlm grpo … --config.grpo.environment=examples.calculator:Calculator --config.grpo.max_turns=4

The calculator accepts one operation with two integers, so the model must choose the order of the operations. The reward
is 1 for the right last message. `python -m examples.demonstrations calculator` writes conversations of a teacher.
"""

import itertools
import json
import operator
import random
import re

from maxlm import EnvironmentStep, Trajectory

# Multiplications come first, in half of the expressions against the order of reading.
SIGNS = ('+*', '-*', '*+', '*-')
OPERATORS = {'+': operator.add, '-': operator.sub, '*': operator.mul}
OPERATION = re.compile(r'(-?\d{1,6})([+*-])(-?\d{1,6})')
# Without a description, so that the prompts of a small model are short.
TOOL = {'type': 'function', 'function': {'name': 'calculate'}}


def calculate(expression: str) -> str:
    """Returns the result of an operation such as `3*14`, or an error message."""
    found = OPERATION.fullmatch(expression)
    if found is None:
        return 'error'
    first, sign, second = found.groups()
    return str(OPERATORS[sign](int(first), int(second)))


def result_of(call: dict) -> dict:
    """Returns the message with the result of a call of the model, whose arguments may have any form."""
    try:
        result = calculate(json.loads(call['function']['arguments'])['expression'])
    except (ValueError, KeyError, TypeError):
        result = 'error'
    return {'role': 'tool', 'tool_call_id': call['id'], 'content': result}


class Calculator:
    """One conversation about an expression with three numbers."""

    tools = (TOOL,)

    def __init__(self):
        self.weights = {}  # the number of calls is a metric without weight
        self.answer = ''

    def examples(self, split: str) -> list[dict]:
        """Returns the expressions of a split: `train`, `eval` or `demonstrations`. No expression is in two of them."""
        orders = itertools.permutations(range(2, 10), 3)
        texts = [f'{a}{signs[0]}{b}{signs[1]}{c}' for a, b, c in orders for signs in SIGNS]
        random.Random(0).shuffle(texts)
        parts = {'eval': slice(100), 'train': slice(100, 500), 'demonstrations': slice(500, None)}
        return [{'expression': text} for text in texts[parts[split]]]

    def reset(self, example: dict, seed: int) -> list[dict]:
        """Returns the question."""
        del seed
        self.answer = str(eval(example['expression']))
        return [{'role': 'user', 'content': example['expression']}]

    async def step(self, messages: list[dict]) -> EnvironmentStep:
        """Runs the calls of a message. A message without calls is the answer, which ends the conversation."""
        calls = messages[-1].get('tool_calls', ())
        if calls:
            return EnvironmentStep([result_of(call) for call in calls], 0.0, False)
        return EnvironmentStep([], float(messages[-1]['content'] == self.answer), True)

    def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Returns the number of calls."""
        return {'calls': sum(len(message.get('tool_calls', ())) for message in trajectory.messages)}
