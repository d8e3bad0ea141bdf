"""Verifiable rewards and weighted sums of rewards such as `numeric + 0.1*length`.

A reward is a pure function of a response and its task, which is the prompt's line as a mapping. `REWARDS` contains all
rewards by name.
Rewards are between 0 and 1, except `length` and `soft_overlong_punishment`, which are between -1 and 0.

| reward | keys of the task | value |
|---|---|---|
| exact | `answer`, a text or a list of texts | 1 if the answer equals one of them, ignoring case, spaces and markup |
| numeric | `answer`, `tolerance` (relative; 1e-6) | 1 if the number equals the answer within the tolerance |
| choice | `answer`, a letter | 1 if this letter is chosen |
| format | | 1 if an answer is marked with \\boxed{}, #### or `answer is` |
| think_format | | 1 if the response begins with <think>, ends this part with </think>, and does not repeat <think> |
| syntax | | 1 if the program can be parsed |
| tests | `tests`, `cases`; see `maxlm.rl.rewards.code_task` | fraction of passed tests |
| all_tests | `tests`, `cases` | 1 if all tests pass |
| length | `target_length`, in characters | 0 up to this length, then linear to -1 at twice the length |

`reward_model`, the score of `grpo.reward_model`, and `soft_overlong_punishment` depend on the tokens of a response, and
`maxlm.rl.token_rewards` computes them.
`package.module:function` is a reward of the user, see `user_reward`.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

from maxlm.config.user_function import FUNCTION_NAME, is_function_name, load_function
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.rl.rewards.answer_parsing import choice_of, last_number, marked_answer, number_of, plain
from maxlm.rl.rewards.code_task import extract_code, run_tasks
from maxlm.rl.rewards.reward_process import RewardProcess
from maxlm.rl.rewards.reward_processes import RewardProcesses
from maxlm.sandbox.functions import FunctionCall, FunctionPool, UserFunction
from maxlm.sandbox.pool import SandboxPool
from maxlm.sandbox.program.function_call import FunctionResult, call_function

Task = Mapping[str, Any]
# Processes that compute rewards of the user.
Functions = FunctionPool | RewardProcess | RewardProcesses
DEFAULT_TOLERANCE = 1e-6
# The parser's memory grows with the length of the program.
MAX_PROGRAM_CHARS = 1 << 20
# Sums and variances of rewards in float32 must be finite, also with the largest weight.
MAX_REWARD, MAX_WEIGHT = 1e9, 1e6


def require_key(task: Task, key: str, reward: str) -> Any:
    """Returns the value of a key of a task. InputError if the key is missing."""
    if key not in task:
        raise InputError(f'the reward {reward} requires the key {key!r}; found keys: {", ".join(task) or "none"}')
    return task[key]


def exact(response: str, task: Task) -> float:
    """Returns 1.0 if the marked answer, the last line if none is marked, or the response equals an expected answer."""
    answer = require_key(task, 'answer', 'exact')
    expected = {plain(str(text)) for text in (answer if isinstance(answer, list | tuple) else [answer])}
    marked = marked_answer(response)
    lines = response.strip().splitlines()
    candidates = {plain(response), plain(marked if marked is not None else lines[-1] if lines else '')}
    return float(bool(expected & candidates))


def numeric(response: str, task: Task) -> float:
    """Returns 1.0 if the number equals the answer within the tolerance.

    The number is the first in the marked answer, or the last in the response if no answer is marked.
    """
    answer = require_key(task, 'answer', 'numeric')
    text = str(answer)
    marked_expected = marked_answer(text)
    expected = number_of(text if marked_expected is None else marked_expected)
    if expected is None:
        raise InputError(f'the reward numeric requires a number as answer, not {text[:80]!r}')
    marked = marked_answer(response)
    predicted = number_of(marked) if marked is not None else last_number(response)
    if predicted is None:
        return 0.0
    tolerance = task.get('tolerance', DEFAULT_TOLERANCE)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise InputError(f'tolerance={tolerance!r}: must be a number of at least 0')
    return float(abs(predicted - expected) <= Fraction(tolerance) * abs(expected))


def choice(response: str, task: Task) -> float:
    """Returns 1.0 if the chosen letter is the answer."""
    expected = str(require_key(task, 'answer', 'choice')).strip(' ().').upper()
    if len(expected) != 1 or not expected.isalpha():
        raise InputError(f'the reward choice requires a letter as answer, not {expected[:80]!r}')
    return float(choice_of(response) == expected)


def format_(response: str, task: Task) -> float:
    """Returns 1.0 if an answer is marked and not empty."""
    return float(bool(marked_answer(response)))


def think_format(response: str, task: Task) -> float:
    """Returns 1.0 if the response is `<think>`, a text, `</think>` and a text, which contain no other `<think>`.

    DeepSeek-AI 2025, "DeepSeek-R1"; the reward `think_format_reward` of TRL.
    """
    begin, found, rest = response.partition('<think>')
    return float(bool(found) and not begin and '<think>' not in rest and '</think>' in rest)


def syntax(response: str, task: Task) -> float:
    """Returns 1.0 if the program of the response can be parsed and is not empty."""
    code = extract_code(response)
    if len(code) > MAX_PROGRAM_CHARS:
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return float(bool(ast.parse(code).body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0


def length(response: str, task: Task) -> float:
    """Returns 0.0 up to the target length, then a linear decrease to -1.0 at twice the target length."""
    target = require_key(task, 'target_length', 'length')
    if isinstance(target, bool) or not isinstance(target, int | float) or not target > 0:
        raise InputError(f'target_length={target!r}: must be a positive number of characters')
    return -min(1.0, max(0.0, len(response) / target - 1))


# Returns None for a response whose reward failed.
BatchReward = Callable[[Sequence[str], Sequence[Task], SandboxPool | None], Sequence[float | None]]


def per_response(function: Callable[[str, Task], float]) -> BatchReward:
    """Returns a reward of many responses from a reward of one response."""
    return lambda responses, tasks, pool: [function(*pair) for pair in zip(responses, tasks, strict=True)]


def tests(responses: Sequence[str], tasks: Sequence[Task], pool: SandboxPool | None) -> list[float]:
    """Returns the fractions of passed tests, run in the sandbox. ValueError if `pool` is None."""
    if pool is None:
        raise ValueError('the rewards tests and all_tests run programs and require a SandboxPool')
    return run_tasks(pool, responses, tasks)


def all_tests(responses: Sequence[str], tasks: Sequence[Task], pool: SandboxPool | None) -> list[float]:
    """Returns 1.0 for each response that passes all tests, else 0.0."""
    return [float(fraction == 1.0) for fraction in tests(responses, tasks, pool)]


REWARDS: dict[str, BatchReward] = {
    'exact': per_response(exact),
    'numeric': per_response(numeric),
    'choice': per_response(choice),
    'format': per_response(format_),
    'think_format': per_response(think_format),
    'syntax': per_response(syntax),
    'tests': tests,
    'all_tests': all_tests,
    'length': per_response(length),
}
# Rewards that depend on the tokens of a response: the score of a reward model, and a punishment of its length.
MODEL_SCORE, OVERLONG = 'reward_model', 'soft_overlong_punishment'
TOKEN_REWARDS = (MODEL_SCORE, OVERLONG)
NEED_SANDBOX = frozenset({'tests', 'all_tests'})


class UserRewardError(InputError):
    """A reward of the user failed.

    Attributes:
        task: task of the response.
    """

    def __init__(self, message: str, task: Task):
        super().__init__(message)
        self.task = task


def user_reward(name: str) -> BatchReward:
    """Returns the reward `package.module:function` of the user.

    The function is called as `function(response, prompt)`: the text of the response, and a copy of the line of the
    prompts file as a dict. It returns a number of at most `MAX_REWARD` in magnitude.

    Raises:
        InputError: the function cannot be imported. The returned reward raises UserRewardError if the function raises
            an exception or returns anything but such a number.
    """
    function = load_function(**user_function(name)._asdict())
    return per_response(
        lambda response, task: _value(name, call_function(function, response, dict(task)), task),
    )


def user_function(name: str) -> UserFunction:
    """Returns the reward `package.module:function` for `FunctionPool`."""
    return UserFunction(name, 'reward', ('response', 'prompt'))


def remote_reward(name: str, functions: Functions, *, is_check: bool) -> BatchReward:
    """Returns a reward of the user that runs in the sandbox or in the reward process, see `user_reward`.

    With the sandbox, a response must not be able to stop a run, so a call that fails has no reward, and one warning
    counts these calls. With `is_check` and in the reward process, it raises UserRewardError instead.
    """
    raises = is_check or not isinstance(functions, FunctionPool)

    def reward(responses: Sequence[str], tasks: Sequence[Task], pool: SandboxPool | None) -> list[float | None]:
        calls = [FunctionCall(name, (response, dict(task))) for response, task in zip(responses, tasks, strict=True)]
        values: list[float | None] = []
        errors = []
        for result, task in zip(functions.call(calls), tasks, strict=True):
            try:
                values.append(_value(name, result, task))
            except UserRewardError as error:
                if raises:
                    raise
                values.append(None)
                errors.append(str(error))
        if errors:
            logger.warning(f'{len(errors)} of {len(calls)} responses get reward 0: {errors[0]}')
        return values

    return reward


def _value(name: str, result: FunctionResult, task: Task) -> float:
    if result.error:
        raise UserRewardError(f'the reward {name} {result.error}; fix the function', task)
    if result.number is not None and -MAX_REWARD <= result.number <= MAX_REWARD:
        return result.number
    raise UserRewardError(f'the reward {name} returned {result.text[:80]!r}; return a number from -1e9 to 1e9', task)


def find_reward(name: str, functions: Functions | None = None, *, is_check: bool = False) -> BatchReward:
    """Returns the reward of this name. Raises InputError if it does not exist.

    Rewards of the user run in `functions` if given, see `remote_reward`.
    """
    if name in REWARDS:
        return REWARDS[name]
    if is_function_name(name):
        return user_reward(name) if functions is None else remote_reward(name, functions, is_check=is_check)
    close = difflib.get_close_matches(name, REWARDS, 1)
    hint = (
        f'did you mean {close[0]}?'
        if close
        else f'use package.module:function or one of: {", ".join([*REWARDS, *TOKEN_REWARDS])}'
    )
    raise InputError(f'unknown reward {name!r}; {hint}')


class Score(NamedTuple):
    """Reward of one response.

    Attributes:
        total: weighted sum.
        components: unweighted value of each reward by name; 0 if it failed.
        is_failed: True if a reward failed.
    """

    total: float
    components: dict[str, float]
    is_failed: bool = False


class RewardSum(NamedTuple):
    """Weighted sum of rewards, given by the weight of each reward name."""

    weights: dict[str, float]

    @property
    def user_functions(self) -> list[UserFunction]:
        """Returns the rewards of the user."""
        return [user_function(name) for name in self.weights if is_function_name(name)]

    @property
    def uses_model(self) -> bool:
        """Returns True if the sum contains the score of a reward model."""
        return MODEL_SCORE in self.weights

    @property
    def needs_sandbox(self) -> bool:
        """Returns True if a reward of the sum runs programs."""
        return bool(NEED_SANDBOX & set(self.weights))

    def score(
        self,
        responses: Sequence[str],
        tasks: Sequence[Task],
        pool: SandboxPool | None = None,
        functions: Functions | None = None,
        by_tokens: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> list[Score]:
        """Scores each response by its task, with the rewards of the user in `functions` if given.

        `by_tokens` has the values of those `TOKEN_REWARDS` that the sum contains.

        Raises:
            InputError: a reward fails or a task lacks a key that it requires.
        """
        columns = [
            by_tokens[name] if name in TOKEN_REWARDS else find_reward(name, functions)(responses, tasks, pool)
            for name in self.weights
        ]
        scores = []
        for values in zip(*columns, strict=True):
            row = {name: value or 0.0 for name, value in zip(self.weights, values, strict=True)}
            total = sum(self.weights[name] * value for name, value in row.items())
            scores.append(Score(total, row, None in values))
        return scores


WEIGHT = r'(\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)\s*\*\s*'
TERM = re.compile(rf'\s*([+-])?\s*(?:{WEIGHT})?({FUNCTION_NAME.pattern}|[A-Za-z_]\w*)\s*')


def parse_reward(text: str, *, is_imported: bool = True) -> RewardSum:
    """Parses a sum of rewards, e.g. `numeric + 0.1*length`, and imports the rewards of the user if `is_imported`.

    Raises:
        InputError: the text is not a valid sum, or a reward cannot be imported.
    """
    weights: dict[str, float] = {}
    position = 0
    while position < len(text) or not weights:
        match = TERM.match(text, position)
        if match is None or (weights and match.group(1) is None):
            rest = text[position:].strip()
            found = f'{rest[:40]!r}' if rest else 'the end'
            raise InputError(f'reward {text!r}: expected a sum such as numeric + 0.1*length at {found}')
        sign, weight, name = match.groups()
        try:
            if name not in TOKEN_REWARDS and (is_imported or not is_function_name(name)):
                find_reward(name)
        except InputError as error:
            raise InputError(f'reward {text!r}: {error}') from error
        if name in weights:
            raise InputError(f'reward {text!r}: {name} occurs twice; add its weights')
        weights[name] = float(weight or 1) * (-1 if sign == '-' else 1)
        if abs(weights[name]) > MAX_WEIGHT:
            raise InputError(f'reward {text!r}: the weight of {name} is {weight}; use at most {MAX_WEIGHT:g}')
        position = match.end()
    return RewardSum(weights)
