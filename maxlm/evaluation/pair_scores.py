"""Scores of held-out pairs by a reward model in training, for the log and the report.

Shapes: B batch, T length.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from maxlm.config.schema import Config
from maxlm.data.chat.scored_tokens import SCORED
from maxlm.data.loader.dataset import TrainingData
from maxlm.data.loader.windows import Batch
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.evaluation.samples import Sample
from maxlm.parallel.determinism import deterministic_options
from maxlm.parallel.layout import Layout
from maxlm.training.batch import BATCH_TYPES
from maxlm.training.forward import make_scores
from maxlm.training.state import Params
from maxlm.training.update import working_params


class PairScores:
    """Scores the same pairs of the validation split at every evaluation."""

    def __init__(self, config: Config, corpus: TrainingData, tokenizer: Tokenizer, layout: Layout):
        """
        Args:
            config: resolved config of a run that trains a reward model.
            corpus: data with a validation split.
            tokenizer: tokenizer of the data.
            layout: layout of the parameters.
        """
        self._layout, self._tokenizer = layout, tokenizer
        self._num_pairs = config.eval.num_samples
        # As many rows as a forward pass of the training step has.
        self._rows = config.train.global_batch_size // config.rounds
        self._batches = corpus.validation_batches(self._rows, 1, with_scored=True)
        scores = make_scores(config, layout)

        def run(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
            return scores(working_params(config, layout, params), None, batch, None)

        # Replicated, because every process reads the scores.
        options = deterministic_options(config, layout.platform)
        self._program = jax.jit(run, out_shardings=layout.named(), compiler_options=options)

    def __call__(self, params: Params) -> list[Sample]:
        """Returns both answers of each pair with their scores. Every process must call it and gets the same result."""
        batch, local = self._batches[0], self._layout.local_rows(self._rows)
        placed = self._layout.put_batch({name: batch[name][local] for name in BATCH_TYPES}, self._rows)
        scores_BT = np.asarray(self._program(params, placed))
        return [
            Sample(prompt, f'{text} ({kind}, score {scores_BT[row, place]:.2f})')
            for (prompt, text, kind, row, place), _ in zip(
                self._answers(batch), range(2 * self._num_pairs), strict=False
            )
        ]

    def _answers(self, batch: Batch) -> Iterator[tuple[str, str, str, int, int]]:
        """Yields prompt, answer, its kind, row, and the index of its scored token, chosen answers first."""
        for row, place in np.argwhere(batch[SCORED] > 0).tolist():
            segment = batch['segments'][row, place]
            (document,) = np.nonzero(batch['segments'][row] == segment)
            # The token after each of these places is a token of the answer.
            (predicting,) = np.nonzero(batch['weights'][row, document])
            first = document[predicting[0]] + 1
            prompt, answer = batch['tokens'][row, document[0] : first], batch['tokens'][row, first : place + 1]
            kind = 'chosen' if segment % 2 else 'rejected'
            yield self._tokenizer.decode(prompt.tolist()), self._tokenizer.decode(answer.tolist()), kind, row, place
