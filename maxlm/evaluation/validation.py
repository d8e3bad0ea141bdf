"""Loss over a list of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.config.schema import Config
from maxlm.data.loader.dataset import TrainingData
from maxlm.parallel.layout import Layout
from maxlm.telemetry.metrics import perplexity
from maxlm.training.objectives import LossSums
from maxlm.training.state import TrainState, evaluated_params
from maxlm.training.step import make_eval_step


class Evaluation(NamedTuple):
    """What is minimized (of next_token in nats per predicted token), and how many tokens were predicted.

    `source_losses` and `source_tokens` are the same by source, where the batches tell sources; the loss of one that had
    no token is NaN. `parts` are further means by name.
    """

    loss: float
    tokens: int
    source_losses: list[float]
    source_tokens: list[int]
    parts: dict[str, float]

    @property
    def told(self) -> dict[str, float]:
        """What a run tells of it, by name."""
        return {'loss': self.loss, **(self.parts or {'perplexity': perplexity(self.loss)})}


class Validation:
    """The validation loss of a run, on always the same batches."""

    def __init__(self, config: Config, corpus: TrainingData, layout: Layout):
        """
        Raises:
            InputError: there is nothing to validate on.
        """
        self._layout, self._global_batch = layout, config.train.global_batch_size
        rows = layout.local_rows(self._global_batch)
        self._batches = corpus.validation_batches(self._global_batch, config.eval.num_batches, rows)
        # Every process reads all of the sums.
        self._step = jax.jit(make_eval_step(config, layout, len(corpus.names)), out_shardings=layout.named())

    def __len__(self) -> int:
        """Batches."""
        return len(self._batches)

    def __call__(self, state: TrainState) -> Evaluation:
        in_order = (self._batches[index] for index in range(len(self._batches)))
        return evaluate(
            self._step,
            evaluated_params(state),
            in_order,
            reference=state.reference,
            layout=self._layout,
            global_batch=self._global_batch,
        )


def evaluate(
    eval_step: Callable[[Any, Any, Any], LossSums],
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    reference: Any = None,
    layout: Layout,
    global_batch: int,
) -> Evaluation:
    """Mean over all predicted tokens, or pairs, of the batches, whose rows are this process's share."""
    sums = [eval_step(params, reference, layout.put_batch(batch, global_batch)) for batch in batches]
    # One transfer at the end: until here the device works through the batches without waiting for Python.
    total = jax.tree.map(lambda *batches: np.sum(np.asarray(batches, np.float64), axis=0), *jax.device_get(sums))
    return Evaluation(
        loss=float(total.loss) / max(float(total.weight), 1.0),
        tokens=int(total.tokens),
        source_losses=means(total.source_loss, total.source_tokens),
        source_tokens=[int(count) for count in total.source_tokens],
        parts={name: float(sum_) / max(float(total.parts_count), 1.0) for name, sum_ in total.parts.items()},
    )


def means(sums: np.ndarray, counts: np.ndarray) -> list[float]:
    """sums / counts; NaN where nothing was counted."""
    return [float(total / count) if count else math.nan for total, count in zip(sums, counts, strict=True)]
