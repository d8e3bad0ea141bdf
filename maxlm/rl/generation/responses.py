"""Generated responses, with their calls of tools and their conversations with environments.

Shapes: B rows (one response each), R maximum response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxlm.rl.rewards.scorer import Scores


class ToolUse(NamedTuple):
    """Tool calls in responses.

    Attributes:
        generated_BR: True for tokens of the model, False for results of tools and after the end of a response.
        num_calls_B: number of calls per row.
        num_errors_B: number of calls per row that failed.
    """

    generated_BR: np.ndarray
    num_calls_B: np.ndarray
    num_errors_B: np.ndarray


class EnvironmentUse(NamedTuple):
    """Prompts and scores of responses that are conversations with environments.

    Attributes:
        prompts: token ids of the prompt of each row, uint32 [number of tokens].
        failed_B: True for the rows that failed before they were scored, bool.
        scores: scores of the rows; None while they are unknown.
    """

    prompts: tuple[np.ndarray, ...]
    failed_B: np.ndarray
    scores: Scores | None = None


class Responses(NamedTuple):
    """Generated responses. Rows are the samples of the first prompt, then those of the second, and so on.

    Attributes:
        tokens_BR: token ids, int32; 0 after the end of a response.
        log_probs_BR: log softmax(logits)[token] in nats at temperature 1 over all ids of the model, float32; 0 after
            the end of a response.
        num_B: number of tokens per row, including the end token.
        ended_B: True if the response has an end token, False if it was cut off.
        passes: number of decoding steps over all calls of the program.
        tools: tool calls and their results, or messages of an environment, among the tokens; None without them.
        environment: prompts and scores of conversations with environments; None without them.
    """

    tokens_BR: np.ndarray
    log_probs_BR: np.ndarray
    num_B: np.ndarray
    ended_B: np.ndarray
    passes: int
    tools: ToolUse | None = None
    environment: EnvironmentUse | None = None

    @property
    def generated(self) -> np.ndarray:
        """True for tokens of the model, False for results of tools and after the end of a response: bool [B, R]."""
        if self.tools is not None:
            return self.tools.generated_BR
        return np.arange(self.tokens_BR.shape[1]) < self.num_B[:, None]

    @property
    def last_turns(self) -> np.ndarray:
        """Index of the first token after the last result of a tool: int [B]."""
        is_result = ~self.generated & (np.arange(self.tokens_BR.shape[1]) < self.num_B[:, None])
        return np.max(np.arange(1, is_result.shape[1] + 1) * is_result, axis=1)

    @property
    def drawn(self) -> int:
        """Number of generated tokens in all rows."""
        return int(self.generated.sum())
