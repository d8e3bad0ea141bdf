"""Scores batches of responses, and statistics of scores.

Shapes: N responses, P prompts, S samples of a prompt.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.rewards.code_task import sandbox_jobs
from maxlm.rewards.prompts import Prompts
from maxlm.rewards.rewards import NEED_SANDBOX, REWARDS, Score, Task, parse_reward
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.pool import SandboxPool
from maxlm.sandbox.program.unit_tests import count_tests

# A sum of rewards that is 1 may come out a little below.
CORRECT_THRESHOLD = 1.0 - 1e-6
# A response for checking tasks.
PROBE_RESPONSE = '0'


class Scores(NamedTuple):
    """Rewards of responses.

    Attributes:
        rewards: float32 [N].
        parts: name of each reward → what it gave before its weight, float32 [N].
    """

    rewards: np.ndarray
    components: dict[str, np.ndarray]


class RewardScorer:
    """Scores responses, running programs in parallel in a sandbox. Close it, or use it in a `with` statement.

    The sandbox is started only if a reward runs programs.
    """

    def __init__(self, reward: str, *rewards: str, workers: int | None = None, limits: SandboxLimits | None = None):
        """
        Args:
            reward: a sum of rewards: see `parse_reward`.
            rewards: further sums for `score`; they share the sandbox.
            workers: programs that run at the same time; by default one for each core of this process.
            limits: of programs.

        Raises:
            InputError: a sum cannot be read, or this machine cannot hold programs that nobody has read.
        """
        self._default = reward
        self._sums = {text: parse_reward(text) for text in (reward, *rewards)}
        self._pool: SandboxPool | None = None
        if any(total.needs_sandbox for total in self._sums.values()):
            self._pool = SandboxPool(_num_cores() if workers is None else workers, limits=limits)
            logger.info(f'programs run in a {self._pool.sandbox}')

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the sandbox."""
        if self._pool is not None:
            self._pool.close()

    def score(self, responses: Sequence[str], tasks: Sequence[Task], *, reward: str = '') -> Scores:
        """Scores each response by its task, by the first of the sums or by `reward`, which must be one of them.

        The same response to the same task (the same object) is scored once.

        Raises:
            InputError: a task lacks what a reward needs; `check_tasks` says so beforehand.
        """
        total = self._sums[reward or self._default]
        keys = [(response, id(task)) for response, task in zip(responses, tasks, strict=True)]
        first_index = {key: index for index, key in reversed(list(enumerate(keys)))}
        indices = list(first_index.values())
        unique_scores = total.score(
            [responses[index] for index in indices], [tasks[index] for index in indices], self._pool
        )
        by_key: dict[tuple[str, int], Score] = dict(zip(first_index, unique_scores, strict=True))
        scores = [by_key[key] for key in keys]
        components = {
            name: np.array([score.components[name] for score in scores], np.float32) for name in total.weights
        }
        return Scores(np.array([score.total for score in scores], np.float32), components)


def check_tasks(prompts: Prompts, reward: str) -> None:
    """Checks that each task has what a sum of rewards needs, before anything is trained.

    Raises:
        InputError: the sum cannot be read, or a task lacks a key or holds what is none; the message names its line.
    """
    checks = [_CHECKS[name] for name in parse_reward(reward).weights]
    for index, task in enumerate(prompts.tasks):
        for check in checks:
            try:
                check(task)
            except InputError as error:
                raise InputError(f'{prompts.location(index)}: {error}') from error


def _check_by(name: str) -> Callable[[Task], None]:
    def check(task: Task) -> None:
        REWARDS[name]([PROBE_RESPONSE], [task], None)

    return check


def _check_python_task(task: Task) -> None:
    """Checks that a task for programs has valid tests or cases."""
    for key in ('prefix', 'suffix'):
        _check_type(task.get(key, ''), str, f'{key!r} is not a text')
    tests, cases = task.get('tests') or [], task.get('cases') or []
    texts = [tests] if isinstance(tests, str) else _check_type(tests, list, "'tests' is not a text or a list of texts")
    for text in texts:
        _check_type(text, str, "'tests' holds what is no text")
    for case in _check_type(cases, list, "'cases' is not a list"):
        _check_type(case, Mapping, "'cases' holds what is no object")
        for key in ('stdin', 'stdout'):
            _check_type(case.get(key, ''), str, f'the {key!r} of a case is not a text')
    sandbox_jobs('', task)
    if texts:
        try:
            count = count_tests(ast.parse('\n'.join(texts)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(f"'tests' cannot be parsed: {error}") from error
        if not count:
            raise InputError("there is no test in 'tests', e.g. a line with assert")


def _check_type(value: Any, kind: type, message: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(message)
    return value


_CHECKS = {name: _check_python_task if name in NEED_SANDBOX else _check_by(name) for name in REWARDS}


def is_correct(rewards: np.ndarray) -> np.ndarray:
    """Returns whether each response has the full reward, 1: bool in the shape of `rewards`."""
    return np.asarray(rewards) >= CORRECT_THRESHOLD


def accuracy(rewards: np.ndarray) -> float:
    """Share of the responses that are right; ValueError without any."""
    if not np.size(rewards):
        raise ValueError('there are no responses to have an accuracy')
    return float(is_correct(rewards).mean())


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k responses is right, when c of n are: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", as the product that
    they give, in which no number is large.

    Raises:
        ValueError: not 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f'pass@{k} of {c} right among {n}: needs 0 ≤ c ≤ n and 1 ≤ k ≤ n')
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_pass_at_k(rewards_PS: np.ndarray, k: int) -> float:
    """Mean over prompts of pass@k, estimated from S samples of each; errors as in `pass_at_k`."""
    S = rewards_PS.shape[1]
    return float(np.mean([pass_at_k(S, int(c), k) for c in is_correct(rewards_PS).sum(axis=1)]))


def _num_cores() -> int:
    # Fewer than the machine has where the process is confined to some.
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
