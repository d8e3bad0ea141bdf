"""Generates responses with calls of tools, in rounds of one turn for each response; see `maxlm.rl.generation.turns`."""

from __future__ import annotations

from collections.abc import Sequence

from maxlm.rl.generation.responses import Responses
from maxlm.rl.generation.tool_environment import TurnReplies
from maxlm.rl.generation.turns import TurnSampler
from maxlm.training.state import Params


class ToolSampler:
    """A `Sampler` whose responses contain tool calls and their results."""

    def __init__(self, sampler: TurnSampler, environment: TurnReplies):
        """
        Args:
            sampler: sampler of turns.
            environment: runs the tools.
        """
        self._sampler, self._environment = sampler, environment

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
        turns = self._sampler.begin(
            prompts,
            seed=seed,
            first_row=first_row,
            num_samples=num_samples,
            temperature=temperature,
            rows_per_run=rows_per_run,
        )
        turns.generate(params)
        while turns.going:
            turns.add(self._environment.replies(turns.going, turns.last_turns, turns.remaining_calls))
            turns.generate(params)
        return turns.responses


def tool_metrics(responses: Responses) -> dict[str, float]:
    """Returns metrics of the tool calls in responses; empty without tools."""
    if responses.tools is None or responses.environment is not None:
        return {}
    _, calls_B, errors_B = responses.tools
    return {
        'rollout/tool_calls': float(calls_B.mean()),
        'rollout/tool_errors': int(errors_B.sum()) / max(1, int(calls_B.sum())),
    }
