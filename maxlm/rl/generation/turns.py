"""Responses of several turns while they are generated, in rounds of one turn for each response.

The first round generates all responses. The next rounds continue those whose last turn has a reply, such as the results
of tools, until no turn has one or a limit is reached. The key of a token depends on the seed, the row and the position,
so a response does not depend on the rounds of other responses. The rounds may have different parameters.

Shapes: B rows, R maximum response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlm.config.schema import Config
from maxlm.parallel.layout import Layout
from maxlm.rl.generation.responses import Responses, ToolUse
from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.rl.generation.tool_continuation import ContinuationSampler
from maxlm.rl.generation.tool_environment import Reply
from maxlm.training.state import Params


class TurnSampler:
    """Generates turns with one model."""

    def __init__(self, sampler: Sampler, config: Config, layout: Layout, *, ends: Sequence[int]):
        """
        Args:
            sampler: sampler of the first turns.
            config: resolved config of the run.
            layout: layout of the parameters.
            ends: token ids that end a turn.
        """
        self.first = sampler
        self.max_tokens, self.max_calls = config.grpo.max_completion_length, config.grpo.max_tool_calls
        self.rows_per_run = config.train.global_batch_size
        self.ends = tuple(ends)
        self.continuation = ContinuationSampler(
            config,
            layout,
            ends=ends,
            max_prompt=config.data.seq_len - 1,
            max_tokens=self.max_tokens,
            max_length=config.data.seq_len,
            gather_once=config.grpo.gather_params_for_generation,
        )

    def begin(self, prompts: Sequence[Sequence[int]], *, recorded: Responses | None = None, **sampling: Any) -> Turns:
        """Begins responses to prompts.

        Args:
            prompts: token ids of each prompt.
            recorded: responses to repeat, see `Turns`.
            sampling: arguments of `Sampler` except the parameters and prompts.
        """
        return Turns(self, prompts, sampling, recorded)


class Turns:
    """Responses of several turns, which `generate` and `add` extend in turn.

    With recorded responses, the first rounds repeat these instead of generating.

    Attributes:
        going: rows whose last turn has ended and waits for a reply.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        prompts: Sequence[Sequence[int]],
        sampling: dict[str, Any],
        recorded: Responses | None,
    ):
        """See `TurnSampler.begin`."""
        self._sampler, self._prompts, self._sampling = sampler, prompts, sampling
        self._num_samples = sampling.get('num_samples', 1)
        B, R = len(prompts) * self._num_samples, sampler.max_tokens
        self._tokens_BR, self._log_probs_BR = np.zeros((B, R), np.int32), np.zeros((B, R), np.float32)
        self._generated_BR = np.zeros((B, R), bool)
        self._num_B, self._ended_B, self._start_B = np.zeros(B, np.int32), np.zeros(B, bool), np.zeros(B, np.int32)
        self._calls_B, self._errors_B = np.zeros_like(self._num_B), np.zeros_like(self._num_B)
        self._passes = self._round = 0
        self.going = list(range(B))
        self._recorded, self._num_recorded = recorded, 0
        if recorded is not None:
            begins_BR = np.diff(recorded.generated.astype(np.int8), axis=1, prepend=0) > 0
            self._num_recorded = int(begins_BR.sum(axis=1).max())

    @property
    def is_repeating(self) -> bool:
        """Returns True if the next round is recorded."""
        return self._round < self._num_recorded

    @property
    def last_turns(self) -> list[list[int]]:
        """Token ids of the last turn of each row of `going`."""
        return [self._tokens_BR[row, self._start_B[row] : self._num_B[row]].tolist() for row in self.going]

    @property
    def remaining_calls(self) -> list[int]:
        """Number of tool calls that each row of `going` may still make."""
        return (self._sampler.max_calls - self._calls_B[self.going]).tolist()

    @property
    def responses(self) -> Responses:
        """Copies of the responses so far."""
        return Responses(
            self._tokens_BR.copy(),
            self._log_probs_BR.copy(),
            self._num_B.copy(),
            self._ended_B.copy(),
            self._passes,
            ToolUse(self._generated_BR.copy(), self._calls_B.copy(), self._errors_B.copy()),
        )

    def generate(self, params: Params) -> None:
        """Generates the next turn of the rows of `going`, or repeats it; `params` are then not used."""
        rows = self.going
        if not rows:
            return
        if self.is_repeating:
            self._repeat(rows)
        else:
            self._append(rows, *self._generate(params, rows))
        self._round += 1
        self.going = [row for row in rows if self._ended_B[row]]

    def add(self, replies: Sequence[Reply | None]) -> None:
        """Appends the reply to each row of `going`. The rows without a reply, or without a token after it, end."""
        continued = []
        for row, reply in zip(self.going, replies, strict=True):
            if reply is None:
                continue
            self._calls_B[row] += reply.num_calls
            self._errors_B[row] += reply.num_errors
            start = self._num_B[row] + len(reply.ids)
            if start < self._sampler.max_tokens:
                self._tokens_BR[row, self._num_B[row] : start] = reply.ids
                self._num_B[row] = self._start_B[row] = start
                continued.append(row)
        self.going = continued

    def end_recorded(self) -> list[int]:
        """Ends the repetition: restores the recorded responses, and returns the rows that differed from them."""
        recorded = self._recorded
        assert recorded is not None
        assert recorded.tools is not None
        R = recorded.tokens_BR.shape[1]
        is_equal_B = (self._tokens_BR[:, :R] == recorded.tokens_BR).all(axis=1) & (self._num_B == recorded.num_B)
        for own_BR, values_BR in (
            (self._tokens_BR, recorded.tokens_BR),
            (self._log_probs_BR, recorded.log_probs_BR),
            (self._generated_BR, recorded.tools.generated_BR),
        ):
            own_BR[:, :R] = values_BR
            own_BR[:, R:] = 0
        self._num_B[:], self._ended_B[:], self._passes = recorded.num_B, recorded.ended_B, recorded.passes
        self._calls_B[:], self._errors_B[:] = recorded.tools.num_calls_B, recorded.tools.num_errors_B
        return np.flatnonzero(~is_equal_B).tolist()

    def _generate(self, params: Params, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns the tokens of the next turn of rows, their log-probabilities and numbers, and which turns ended."""
        sampler, sampling = self._sampler, self._sampling
        if self._round == 0:
            found = sampler.first(params, self._prompts, **sampling)
        else:
            found = sampler.continuation.resume(
                params,
                [
                    [*self._prompts[row // self._num_samples], *self._tokens_BR[row, : self._num_B[row]].tolist()]
                    for row in rows
                ],
                seed=sampling['seed'],
                rows=[sampling.get('first_row', 0) + row for row in rows],
                limits=(sampler.max_tokens - self._num_B[rows]).tolist(),
                temperature=sampling.get('temperature', 1.0),
                rows_per_run=sampler.rows_per_run,
            )
        self._passes += found.passes
        last_B = found.tokens_BR[np.arange(len(rows)), found.num_B - 1]
        return found.tokens_BR, found.log_probs_BR, found.num_B, np.isin(last_B, sampler.ends)

    def _repeat(self, rows: Sequence[int]) -> None:
        """Repeats the next turn of rows; a row that has none ends without one."""
        recorded = self._recorded
        assert recorded is not None
        for row in rows:
            start = int(self._num_B[row])
            is_other_R = ~recorded.generated[row, start:]
            num = int(np.argmax(is_other_R)) if is_other_R.any() else len(is_other_R)
            self._ended_B[row] = False
            if num:
                place = slice(start, start + num)
                turn = (recorded.tokens_BR[row : row + 1, place], recorded.log_probs_BR[row : row + 1, place])
                is_ended = np.isin(recorded.tokens_BR[row, start + num - 1], self._sampler.ends)
                self._append([row], *turn, np.array([num]), np.array([is_ended]))

    def _append(
        self,
        rows: Sequence[int],
        tokens_BR: np.ndarray,
        log_probs_BR: np.ndarray,
        num_B: np.ndarray,
        ended_B: np.ndarray,
    ) -> None:
        for index, row in enumerate(rows):
            num = num_B[index]
            place = slice(self._num_B[row], self._num_B[row] + num)
            self._tokens_BR[row, place] = tokens_BR[index, :num]
            self._log_probs_BR[row, place] = log_probs_BR[index, :num]
            self._generated_BR[row, place] = True
            self._num_B[row] += num
            self._ended_B[row] = ended_B[index]
