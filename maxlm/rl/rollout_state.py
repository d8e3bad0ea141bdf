"""Responses of a rollout that are not yet used for training, and their form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from maxlm.rl.responses import Responses


class Rollout(NamedTuple):
    """Responses to the prompts of a rollout.

    Attributes:
        number: number of the rollout, counted from 0.
        step: number of updates of the parameters that generated the responses.
        responses: the responses.
        began, ended: times of the generation in seconds, on the clock `time.perf_counter`.
    """

    number: int
    step: int
    responses: Responses
    began: float
    ended: float

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the rollout as arrays, without the columns after the longest response."""
        responses = self.responses
        R = int(responses.num_B.max())
        return {
            'numbers': np.array([self.number, self.step, responses.passes], np.int32),
            'seconds': np.array([self.ended - self.began], np.float32),
            'tokens': responses.tokens_BR[:, :R],
            'log_probs': responses.log_probs_BR[:, :R],
            'lengths': responses.num_B,
            'ended': responses.ended_B,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Rollout:
        """Returns the rollout of `to_arrays`. Its generation began at 0 s."""
        number, step, passes = map(int, arrays['numbers'])
        names = ('tokens', 'log_probs', 'lengths', 'ended')
        tokens_BR, log_probs_BR, num_B, ended_B = (np.asarray(arrays[name]) for name in names)
        responses = Responses(tokens_BR, log_probs_BR, num_B, ended_B, passes)
        return cls(number, step, responses, 0.0, float(arrays['seconds'][0]))
