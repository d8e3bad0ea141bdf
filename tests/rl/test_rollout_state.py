"""Tests the form of a rollout in a checkpoint."""

import numpy as np

from maxlm.rl.responses import Responses
from maxlm.rl.rollout_state import Rollout


def test_the_arrays_of_a_rollout_are_complete():
    rng = np.random.default_rng(0)
    lengths = np.array([2, 3])
    tokens, log_probs = rng.integers(1, 9, (2, 5)), rng.normal(size=(2, 5)).astype(np.float32)
    for row, length in enumerate(lengths):
        tokens[row, length:] = log_probs[row, length:] = 0
    rollout = Rollout(3, 7, Responses(tokens, log_probs, lengths, np.array([True, False]), 4), 1.0, 1.5)
    restored = Rollout.from_arrays(rollout.to_arrays())
    assert restored[:2] == (3, 7)
    assert restored.ended - restored.began == 0.5
    for found, expected in zip(restored.responses, rollout.responses, strict=True):
        np.testing.assert_array_equal(found, expected[:, :3] if np.ndim(expected) == 2 else expected)
