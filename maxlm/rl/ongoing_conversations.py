"""Conversations with environments that are generated while the devices train on earlier rollouts.

With `grpo.max_staleness` = k, the conversations of rollout n + k begin before the training on rollout n. Before this
training, the devices generate one turn of rollouts n + 2 to n + k, and all remaining turns of rollout n + 1. The
environments answer these turns, and score complete conversations, in threads during the training. The turns of a
conversation may thus have different parameters, which depends on the numbers of rollouts and turns only, and not on
times.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from maxlm.rl.environments.first_process import run_in_first_process
from maxlm.rl.generation.conversation_rollout import ConversationRollout
from maxlm.rl.generation.timed_environment import Stopwatch
from maxlm.rl.pending_rollouts import PendingRollouts, ScoringJob
from maxlm.rl.rewards.scorer import Scores
from maxlm.rl.rollout_state import Rollout
from maxlm.training.state import Params


@dataclasses.dataclass
class _Ongoing:
    """Conversations of a rollout, the calls of their environments, and fields of `Rollout`; no step before a turn."""

    conversations: ConversationRollout
    future: Future[tuple[Any, float]]
    step: int | None = None
    seconds: float = 0.0


class OngoingConversations:
    """Begins and continues conversations, and adds them to the pending rollouts after each turn."""

    def __init__(
        self,
        pending: PendingRollouts,
        begin: Callable[[int, Rollout | None], ConversationRollout],
        *,
        ahead: int,
        waits: Stopwatch,
        work: Stopwatch,
    ):
        """
        Args:
            pending: receives the rollouts.
            begin: returns the conversations of the rollout with this number, or those that continue a rollout of a
                checkpoint.
            ahead: k.
            waits: receives the seconds for which the devices wait for environments.
            work: receives the seconds of the calls of `reset` and `step`.
        """
        self._pending, self._begin, self._ahead = pending, begin, ahead
        self._waits, self._work = waits, work
        self._executor = ThreadPoolExecutor(ahead + 2, thread_name_prefix='environments')
        self._ongoing: dict[int, _Ongoing] = {}
        self._scored: dict[int, ConversationRollout] = {}

    def generate(self, number: int, last: int, step: int, params: Params) -> None:
        """Continues the conversations before the training on rollout `number`.

        Args:
            number: n.
            last: number of the last rollout of the run.
            step: number of updates of `params`.
            params: parameters that generate the turns.

        Raises:
            InputError: too many calls of an environment do not end.
        """
        restored = {rollout.number: rollout for rollout in self._pending.unscored}
        # The calls of `reset` of one more rollout also run during the training.
        for one in range(number, min(number + self._ahead + 1, last) + 1):
            is_new = one in restored or one not in self._pending.numbers
            if is_new and one not in self._ongoing:
                self._start(one, restored.get(one))
        first, *later = range(number, min(number + self._ahead, last) + 1)
        for one in (first, *later):
            while one in self._ongoing and self._ongoing[one].conversations.is_repeating:
                self._advance(one, step, params)
        self._complete(first, step, params)
        # Their environments answer while the devices generate the remaining turns of the next rollout.
        for one in later[1:]:
            if one in self._ongoing:
                self._advance(one, step, params)
        for one in later[:1]:
            self._complete(one, step, params)

    def close(self) -> None:
        """Closes the environments of conversations that are not scored, and starts no more calls."""
        if jax.process_index() == 0:
            for conversations in (*(one.conversations for one in self._ongoing.values()), *self._scored.values()):
                conversations.end()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self, number: int, recorded: Rollout | None) -> None:
        conversations = self._begin(number, recorded)
        ongoing = _Ongoing(conversations, self._submit(conversations))
        if recorded is not None:
            ongoing.step, ongoing.seconds = recorded.step, recorded.seconds
        self._ongoing[number] = ongoing

    def _submit(self, conversations: ConversationRollout) -> Future[tuple[Any, float]]:
        job = conversations.job

        def timed() -> tuple[Any, float]:
            began = time.perf_counter()
            # The first process runs the environments.
            return job() if jax.process_index() == 0 else None, time.perf_counter() - began

        return self._executor.submit(timed)

    def _complete(self, number: int, step: int, params: Params) -> None:
        while number in self._ongoing:
            self._advance(number, step, params)

    def _advance(self, number: int, step: int, params: Params) -> None:
        """Waits for the environments, and generates the next turns of the conversations of a rollout."""
        ongoing = self._ongoing[number]
        conversations, is_repeating = ongoing.conversations, ongoing.conversations.is_repeating
        with self._waits.running():
            result, seconds = run_in_first_process(ongoing.future.result)
        self._work.seconds += seconds
        began = time.perf_counter()
        conversations.advance(result, params)
        if not is_repeating:
            ongoing.seconds += time.perf_counter() - began
        ongoing.step = step if ongoing.step is None else ongoing.step
        is_complete = conversations.is_generated
        if conversations.is_repeating:
            ongoing.future = self._submit(conversations)
            return
        self._pending.add(Rollout(number, ongoing.step, conversations.responses, ongoing.seconds, is_complete))
        if is_complete:
            del self._ongoing[number]
            self._score(number, conversations)
        else:
            ongoing.future = self._submit(conversations)

    def _score(self, number: int, conversations: ConversationRollout) -> None:
        self._scored[number] = conversations
        job = conversations.job

        def collect(wait: Callable[[], Any]) -> Scores:
            closed = run_in_first_process(wait)
            self._scored.pop(number, None)
            return conversations.scores(closed)

        self._pending.score(number, ScoringJob(job if jax.process_index() == 0 else lambda: None, collect))
