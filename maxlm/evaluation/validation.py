"""Validation loss on a fixed list of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.config.schema import Config
from maxlm.data.loader.dataset import TrainingData
from maxlm.parallel.determinism import deterministic_options
from maxlm.parallel.layout import Layout
from maxlm.telemetry.metrics import perplexity
from maxlm.training.losses.router import ROUTER_PARTS
from maxlm.training.objectives import LossSums
from maxlm.training.state import TrainState, evaluated_params
from maxlm.training.step import make_eval_step


class Evaluation(NamedTuple):
    """Result of an evaluation.

    Attributes:
        loss: mean of the minimized quantity (for next_token, nats per predicted token).
        tokens: number of predicted tokens.
        source_losses: loss of each source, NaN for a source without tokens; empty if batches have no sources.
        source_tokens: number of predicted tokens of each source.
        parts: other means by name.
    """

    loss: float
    tokens: int
    source_losses: list[float]
    source_tokens: list[int]
    parts: dict[str, float]

    @property
    def logged_metrics(self) -> dict[str, float]:
        """Metrics to log, by name."""
        return {'loss': self.loss, **(self.parts or {'perplexity': perplexity(self.loss)})}


class Validation:
    """Validation loss of a run, always on the same batches."""

    def __init__(self, config: Config, corpus: TrainingData, layout: Layout):
        """Opens the validation batches.

        Raises:
            InputError: there is no validation data.
        """
        self._layout, self._global_batch = layout, config.train.global_batch_size
        rows = layout.local_rows(self._global_batch)
        self._batches = corpus.validation_batches(
            self._global_batch, config.eval.num_batches, rows, with_scored=config.train.objective == 'reward'
        )
        # Replicated, because every process reads the sums.
        self._step = jax.jit(
            make_eval_step(config, layout, len(corpus.names)),
            out_shardings=layout.named(),
            # The validation loss may end the run.
            compiler_options=deterministic_options(config, layout.platform),
        )

    def __len__(self) -> int:
        """Returns the number of batches."""
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
    """Returns the mean over all predicted tokens or pairs. Each process passes its own rows of the batches."""
    sums = [eval_step(params, reference, layout.put_batch(batch, global_batch)) for batch in batches]
    # Transfer once at the end, so that the device never waits for the host between batches.
    total = jax.tree.map(lambda *batches: np.sum(np.asarray(batches, np.float64), axis=0), *jax.device_get(sums))
    return Evaluation(
        loss=float(total.loss) / max(float(total.weight), 1.0),
        tokens=int(total.tokens),
        source_losses=means(total.source_loss, total.source_tokens),
        source_tokens=[int(count) for count in total.source_tokens],
        # The statistics of routers are metrics of the training step.
        parts={
            name: float(sum_) / max(float(total.part_counts[name]), 1.0)
            for name, sum_ in total.parts.items()
            if name not in ROUTER_PARTS
        },
    )


def means(sums: np.ndarray, counts: np.ndarray) -> list[float]:
    """Returns sums / counts, NaN where the count is 0."""
    return [float(total / count) if count else math.nan for total, count in zip(sums, counts, strict=True)]
