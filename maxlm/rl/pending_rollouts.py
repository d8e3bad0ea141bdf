"""Rollouts that wait for training: their responses are generated, and their rewards are computed in the background.

With `grpo.max_staleness` = k, the rollouts n to n + k are pending before the training on rollout n. A thread scores
them in their order while the main thread generates and trains. All programs of the devices run in the main thread, so
that they have the same order in all processes.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlm.rl.rewards.scorer import Scores
from maxlm.rl.rollout_state import Rollout, from_arrays, to_arrays


class ScoringJob(NamedTuple):
    """Computes the scores of a rollout.

    Attributes:
        run: does the part of this process, in a thread.
        collect: returns the scores of all responses, given a function that waits for the result of `run`. All processes
            call it at the same point.
    """

    run: Callable[[], Any]
    collect: Callable[[Callable[[], Any]], Scores]


@dataclasses.dataclass
class _Pending:
    """A rollout, the job that scores it, if it has begun, and the scores of all responses, if they are known."""

    rollout: Rollout
    job: ScoringJob | None = None
    future: Future[Any] | None = None
    scores: Scores | None = None
    seconds: float = 0.0

    def run(self) -> Any:
        assert self.job is not None
        began = time.perf_counter()
        try:
            return self.job.run()
        finally:
            self.seconds = time.perf_counter() - began

    def collect(self) -> Scores:
        """Returns the scores, and waits for the job if they are not known."""
        if self.scores is None:
            assert self.job is not None
            self.scores = self.job.collect(self.run if self.future is None else self.future.result)
        return self.scores


class PendingRollouts:
    """Queue of rollouts in the order of training."""

    def __init__(self, *, in_background: bool):
        """
        Args:
            in_background: score the responses in a thread. Otherwise `scores` does so in the thread that calls it.
        """
        self._queue: deque[_Pending] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix='rewards') if in_background else None

    def close(self) -> None:
        """Starts no more jobs, and does not wait for the current one."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def keep(self, numbers: Collection[int], is_valid: Callable[[Rollout], bool]) -> None:
        """Removes rollouts with other numbers and those that are not valid, which a checkpoint may contain."""
        self._queue = deque(
            entry for entry in self._queue if entry.rollout.number in numbers and is_valid(entry.rollout)
        )

    @property
    def unscored(self) -> list[Rollout]:
        """Returns the rollouts for which `score` has not been called and whose scores are unknown."""
        return [entry.rollout for entry in self._queue if entry.job is None and entry.scores is None]

    @property
    def numbers(self) -> list[int]:
        """Returns the numbers of the rollouts in the queue."""
        return [entry.rollout.number for entry in self._queue]

    def add(self, rollout: Rollout) -> None:
        """Adds a rollout in the order of the numbers, or replaces the one with the same number."""
        others = [entry for entry in self._queue if entry.rollout.number != rollout.number]
        self._queue = deque(sorted([*others, _Pending(rollout)], key=lambda entry: entry.rollout.number))

    def score(self, number: int, job: ScoringJob) -> None:
        """Lets `job` score the responses of a rollout."""
        entry = next(entry for entry in self._queue if entry.rollout.number == number)
        entry.job = job
        if self._executor is not None:
            entry.future = self._executor.submit(entry.run)

    def first(self) -> tuple[Rollout, Scores, float]:
        """Waits for the scores of the first rollout. It stays in the queue, also if its job raises an exception.

        Returns:
            The rollout, the scores of all responses, and the seconds of the job; 0 if a checkpoint contained the
            scores.
        """
        entry = self._queue[0]
        scores = entry.collect()
        return entry.rollout, scores, entry.seconds

    def remove_first(self) -> None:
        """Removes the first rollout."""
        self._queue.popleft()

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the rollouts for a checkpoint, with the scores that are known by now in all processes."""
        jobs = [entry.future for entry in self._queue]
        done = np.array([job is not None and job.done() and job.exception() is None for job in jobs], bool)
        if jax.process_count() > 1 and jobs:
            in_all = np.asarray(multihost_utils.process_allgather(done)).reshape(-1, len(jobs))
            done = np.asarray(in_all.all(axis=0))
        for entry, is_done in zip(self._queue, done, strict=True):
            if is_done:
                entry.collect()
        return to_arrays([(entry.rollout, entry.scores) for entry in self._queue])

    def load_arrays(self, arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> None:
        """Replaces the rollouts by those of `to_arrays`; `names` are the rewards of the sum."""
        self._queue = deque(_Pending(rollout, scores=scores) for rollout, scores in from_arrays(arrays, names))
