"""Loss over a list of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.training.sharding import Layout


class Evaluation(NamedTuple):
    """Cross-entropy in nats per predicted token, and how many tokens were predicted."""

    loss: float
    tokens: int


def evaluate(
    eval_step: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    layout: Layout,
    global_batch: int,
) -> Evaluation:
    """Mean over all predicted tokens of the batches, whose rows are this process's share."""
    sums = [eval_step(params, layout.put_batch(batch, global_batch)) for batch in batches]
    # One transfer at the end: until here the device works through the batches without waiting for Python.
    losses, counts = zip(*jax.device_get(sums), strict=True)
    tokens = float(np.sum(np.asarray(counts, np.float64)))
    return Evaluation(loss=float(np.sum(np.asarray(losses, np.float64))) / max(tokens, 1), tokens=int(tokens))
