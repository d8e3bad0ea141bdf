"""Generates responses of several turns, in rounds: with calls of tools, or conversations with environments.

The first round generates all responses. The next rounds continue those whose last turn has a reply, such as the results
of tools, until no turn has one or a limit is reached. The key of a token depends on the seed, the row and the position,
so a response does not depend on the rounds of other responses.

Shapes: B rows, R maximum response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maxlm.config.schema import Config
from maxlm.parallel.layout import Layout
from maxlm.rl.generation.responses import Responses, ToolUse
from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.rl.generation.tool_continuation import ContinuationSampler
from maxlm.rl.generation.tool_environment import TurnReplies
from maxlm.training.state import Params


class ToolSampler:
    """A `Sampler` whose responses contain tool calls and their results."""

    def __init__(
        self, sampler: Sampler, environment: TurnReplies, config: Config, layout: Layout, *, ends: Sequence[int]
    ):
        """Initializes the sampler.

        Args:
            sampler: sampler of the first turns.
            environment: runs the tools, or passes the turns to environments.
            config: resolved config of the run.
            layout: layout of the parameters.
            ends: token ids that end a turn.
        """
        self._sampler, self._environment = sampler, environment
        self._max_tokens, self._max_calls = config.grpo.max_completion_length, config.grpo.max_tool_calls
        self._rows_per_run = config.train.global_batch_size
        self._ends = tuple(ends)
        self._continuation = ContinuationSampler(
            config,
            layout,
            ends=ends,
            max_prompt=config.data.seq_len - 1,
            max_tokens=self._max_tokens,
            max_length=config.data.seq_len,
            gather_once=config.grpo.gather_params_for_generation,
        )

    def __call__(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        first_row: int = 0,
        num_samples: int = 1,
        temperature: float = 1.0,
        rows_per_run: int = 0,
    ) -> Responses:
        """Generates `num_samples` responses to each prompt, see `Sampler`.

        A response ends with a turn without tool calls, or with a turn whose calls exceed `grpo.max_tool_calls` or whose
        results leave no token for the next turn.
        """
        first = self._sampler(
            params,
            prompts,
            seed=seed,
            first_row=first_row,
            num_samples=num_samples,
            temperature=temperature,
            rows_per_run=rows_per_run,
        )
        R, passes = self._max_tokens, first.passes
        tokens_BR, log_probs_BR, num_B, ended_B = (np.array(field) for field in first[:4])
        generated_BR = np.array(first.generated)
        calls_B, errors_B = np.zeros_like(num_B), np.zeros_like(num_B)
        start_B = np.zeros_like(num_B)
        going = np.flatnonzero(ended_B).tolist()
        while going:
            turns = [tokens_BR[row, start_B[row] : num_B[row]].tolist() for row in going]
            replies = self._environment.replies(going, turns, (self._max_calls - calls_B[going]).tolist())
            continued = []
            for row, reply in zip(going, replies, strict=True):
                if reply is None:
                    continue
                calls_B[row] += reply.num_calls
                errors_B[row] += reply.num_errors
                start = num_B[row] + len(reply.ids)
                if start < R:
                    tokens_BR[row, num_B[row] : start] = reply.ids
                    num_B[row] = start_B[row] = start
                    continued.append(row)
            going = continued
            if not going:
                break
            found = self._continuation.resume(
                params,
                [[*prompts[row // num_samples], *tokens_BR[row, : num_B[row]].tolist()] for row in going],
                seed=seed,
                rows=[first_row + row for row in going],
                limits=(R - num_B[going]).tolist(),
                temperature=temperature,
                rows_per_run=self._rows_per_run,
            )
            passes += found.passes
            for index, row in enumerate(going):
                new = found.num_B[index]
                place = slice(num_B[row], num_B[row] + new)
                tokens_BR[row, place] = found.tokens_BR[index, :new]
                log_probs_BR[row, place] = found.log_probs_BR[index, :new]
                generated_BR[row, place] = True
                num_B[row] += new
                ended_B[row] = tokens_BR[row, num_B[row] - 1] in self._ends
            going = [row for row in going if ended_B[row]]
        return Responses(tokens_BR, log_probs_BR, num_B, ended_B, passes, ToolUse(generated_BR, calls_B, errors_B))


def tool_metrics(responses: Responses) -> dict[str, float]:
    """Returns metrics of the tool calls in responses; empty without tools."""
    if responses.tools is None or responses.environment is not None:
        return {}
    _, calls_B, errors_B = responses.tools
    return {
        'rollout/tool_calls': float(calls_B.mean()),
        'rollout/tool_errors': int(errors_B.sum()) / max(1, int(calls_B.sum())),
    }
