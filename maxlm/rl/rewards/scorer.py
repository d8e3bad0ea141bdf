"""Scores batches of responses and computes statistics of scores.

Shapes: N responses, P prompts, S samples of a prompt.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.rl.rewards.code_task import sandbox_jobs
from maxlm.rl.rewards.prompts import Prompts
from maxlm.rl.rewards.rewards import (
    NEED_SANDBOX,
    REWARDS,
    TOKEN_REWARDS,
    Functions,
    Score,
    Task,
    find_reward,
    parse_reward,
)
from maxlm.sandbox.functions import num_cores
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.pool import SandboxPool
from maxlm.sandbox.program.unit_tests import count_tests

# A sum of rewards that equals 1 may be slightly lower because of rounding.
CORRECT_THRESHOLD = 1.0 - 1e-6
# A response that is scored only to check tasks.
PROBE_RESPONSE = '0'


class Scores(NamedTuple):
    """Rewards of responses.

    Attributes:
        rewards: float32 [N].
        components: unweighted values of each reward by name, float32 [N].
        failed: 1 if a reward of the user in the sandbox failed for the response, else 0, float32 [N].
        excluded: 1 if the response is not used, because its environment failed, else 0, float32 [N]; None = all are
            used. Components may be NaN for responses without this reward.
    """

    rewards: np.ndarray
    components: dict[str, np.ndarray]
    failed: np.ndarray
    excluded: np.ndarray | None = None

    @property
    def used(self) -> np.ndarray:
        """True for responses that are used: bool [N]."""
        return np.ones(len(self.rewards), bool) if self.excluded is None else self.excluded == 0

    def metrics(self, config: GrpoConfig) -> dict[str, float]:
        """Returns the metrics of a rollout, whose responses to the same prompt are consecutive."""
        groups_PS, used_PS = (values.reshape(-1, config.num_generations) for values in (self.rewards, self.used))
        has_any = used_PS.any(axis=1)
        groups_PS, used_PS = groups_PS[has_any], used_PS[has_any]
        # Without excluded responses, the sums have the same order as before there were any.
        where: Any = True if self.excluded is None else used_PS
        spread = np.max(groups_PS, axis=1, where=where, initial=-np.inf)
        spread = spread - np.min(groups_PS, axis=1, where=where, initial=np.inf)
        parts = {name: part[self.used & ~np.isnan(part)] for name, part in self.components.items()}
        return {
            'rollout/reward': float(self.rewards[self.used].mean()),
            'rollout/reward_std': float(groups_PS.std(axis=1, where=where).mean()),
            **{f'rollout/reward/{name}': float(part.mean()) for name, part in parts.items() if len(part)},
            'rollout/frac_reward_zero_std': float((spread == 0).mean()),
            **({'rollout/reward_errors': float(self.failed.mean())} if config.sandbox_functions else {}),
        }


class RewardScorer:
    """Scores responses and runs their programs in parallel in a sandbox.

    The sandbox is started only if a reward runs programs. Use the scorer as a context manager, or call `close`.
    """

    def __init__(
        self,
        reward: str,
        *rewards: str,
        workers: int | None = None,
        limits: SandboxLimits | None = None,
        functions: Functions | None = None,
    ):
        """
        Args:
            reward: default sum of rewards, see `parse_reward`.
            rewards: further sums for `score`; they share the sandbox.
            workers: number of programs that run at the same time; defaults to the number of cores of this process.
            limits: resource limits of programs.
            functions: sandbox or process of the rewards of the user; None = they run in this process.

        Raises:
            InputError: a sum cannot be parsed, or this machine cannot isolate untrusted programs.
        """
        self._default = reward
        self._functions = functions
        self._sums = {text: parse_reward(text, is_imported=functions is None) for text in (reward, *rewards)}
        self._pool: SandboxPool | None = None
        if any(total.needs_sandbox for total in self._sums.values()):
            self._pool = SandboxPool(num_cores() if workers is None else workers, limits=limits)
            logger.info(f'programs run in a {self._pool.sandbox}')

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the sandbox."""
        if self._pool is not None:
            self._pool.close()

    def score(
        self,
        responses: Sequence[str],
        tasks: Sequence[Task],
        *,
        reward: str = '',
        by_tokens: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> Scores:
        """Scores each response by its task, with the default sum or with `reward`, one of the sums of the scorer.

        Equal responses to the same task object are scored once. `by_tokens` has the values of those `TOKEN_REWARDS`
        that the sum contains.

        Raises:
            UserRewardError: a reward of the user failed in this process.
            InputError: a task lacks a key that a reward requires; `check_tasks` detects this in advance.
        """
        total = self._sums[reward or self._default]
        # Equal texts may have different tokens, and then different scores of a reward model.
        names = [name for name in TOKEN_REWARDS if name in total.weights]
        keys = [
            (response, id(task), *(float(by_tokens[name][index]) for name in names))
            for index, (response, task) in enumerate(zip(responses, tasks, strict=True))
        ]
        first_index: dict[tuple[Any, ...], int] = {}
        for index, key in enumerate(keys):
            first_index.setdefault(key, index)
        indices = list(first_index.values())
        unique_scores = total.score(
            [responses[index] for index in indices],
            [tasks[index] for index in indices],
            self._pool,
            self._functions,
            {name: [float(by_tokens[name][index]) for index in indices] for name in names},
        )
        by_key: dict[tuple[Any, ...], Score] = dict(zip(first_index, unique_scores, strict=True))
        scores = [by_key[key] for key in keys]
        return Scores(
            np.array([score.total for score in scores], np.float32),
            {name: np.array([score.components[name] for score in scores], np.float32) for name in total.weights},
            np.array([score.is_failed for score in scores], np.float32),
        )


def check_tasks(prompts: Prompts, reward: str, functions: Functions | None = None) -> None:
    """Checks before training that each task has valid values for all keys that a sum of rewards requires.

    A reward of the user is only called for the first task, because it may be slow. It runs in `functions` if given.

    Raises:
        InputError: the sum cannot be parsed, a reward of the user fails, or a task lacks a key or has an invalid value.
            The message names its line.
    """
    names = [name for name in parse_reward(reward, is_imported=functions is None).weights if name not in TOKEN_REWARDS]
    checks = [_CHECKS[name] for name in names if name in REWARDS]
    user_checks = [_check_by(name, functions) for name in names if name not in REWARDS]
    for index, task in enumerate(prompts.tasks):
        for check in checks if index else [*checks, *user_checks]:
            try:
                check(task)
            except InputError as error:
                raise InputError(f'{prompts.location(index)}: {error}') from error


def _check_by(name: str, functions: Functions | None = None) -> Callable[[Task], None]:
    def check(task: Task) -> None:
        find_reward(name, functions, is_check=True)([PROBE_RESPONSE], [task], None)

    return check


def _check_python_task(task: Task) -> None:
    """Checks that a task for programs has valid tests or cases."""
    for key in ('prefix', 'suffix'):
        _check_type(task.get(key, ''), str, f'{key!r} must be a string')
    tests, cases = task.get('tests') or [], task.get('cases') or []
    texts = (
        [tests] if isinstance(tests, str) else _check_type(tests, list, "'tests' must be a string or a list of strings")
    )
    for text in texts:
        _check_type(text, str, "'tests' must contain only strings")
    for case in _check_type(cases, list, "'cases' must be a list"):
        _check_type(case, Mapping, "'cases' must contain only objects")
        for key in ('stdin', 'stdout'):
            _check_type(case.get(key, ''), str, f'{key!r} of a case must be a string')
    sandbox_jobs('', task)
    if texts:
        try:
            count = count_tests(ast.parse('\n'.join(texts)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(f"'tests' cannot be parsed: {error}; fix the code") from error
        if not count:
            raise InputError("'tests' contains no test; add one, e.g. a line with assert")


def _check_type(value: Any, kind: type, message: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(message)
    return value


_CHECKS = {name: _check_python_task if name in NEED_SANDBOX else _check_by(name) for name in REWARDS}


def is_correct(rewards: np.ndarray) -> np.ndarray:
    """Returns True for each response with the full reward of 1, as booleans in the shape of `rewards`."""
    return np.asarray(rewards) >= CORRECT_THRESHOLD


def accuracy(rewards: np.ndarray) -> float:
    """Returns the fraction of correct responses. Raises ValueError if there are none."""
    if not np.size(rewards):
        raise ValueError('accuracy requires at least one response')
    return float(is_correct(rewards).mean())


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the probability that at least one of k responses is correct if c of n are: 1 - C(n - c, k) / C(n, k).

    It is the unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", computed as
    the product from the paper, which contains no large numbers.

    Raises:
        ValueError: 0 ≤ c ≤ n or 1 ≤ k ≤ n does not hold.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f'pass@{k} with n={n} and c={c}: requires 0 ≤ c ≤ n and 1 ≤ k ≤ n')
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_pass_at_k(rewards_PS: np.ndarray, k: int) -> float:
    """Returns the mean of pass@k over prompts, estimated from S samples each; raises the errors of `pass_at_k`."""
    S = rewards_PS.shape[1]
    return float(np.mean([pass_at_k(S, int(c), k) for c in is_correct(rewards_PS).sum(axis=1)]))
