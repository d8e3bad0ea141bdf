"""Metrics and log lines per data source: fractions, epochs and losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maxlm.data.loader.dataset import TrainingData
from maxlm.data.loader.mixture import StagedMixture
from maxlm.evaluation.validation import means
from maxlm.log import logger


class SourceMetrics:
    """Metrics per source of a run's rows. Rows without sources have none."""

    def log_start(self, num_windows: int) -> None:
        """Logs how a run of `num_windows` windows uses each weighted source."""

    def training_metrics(self, num_windows: int, losses: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
        """Returns the metrics of a step by source, after `num_windows` windows in total.

        Sources without tokens in the step have no loss.
        """
        del num_windows, losses, tokens
        return {}

    def evaluation_metrics(self, losses: Sequence[float], tokens: Sequence[float]) -> dict[str, float]:
        """Returns the metrics of an evaluation by source."""
        del losses, tokens
        return {}


class SourceStats(SourceMetrics):
    """Metrics and log lines of a run's data sources. Runs with a single source have none."""

    def __init__(self, corpus: TrainingData, mixture: StagedMixture):
        self._names = corpus.names
        self._all = [source.name for source in corpus.sources]
        self._weighted = bool(corpus.data.sources)
        self._mixture = mixture
        self._windows = corpus.source_windows
        self._row_summaries = [source.row_summary(corpus.data) for source in corpus.sources]
        self._warn_epochs = corpus.data.warn_epochs

    def log_start(self, num_windows: int) -> None:
        """See `SourceMetrics`."""
        for line in filter(None, self._row_summaries):
            logger.info(line)
        if not self._weighted:
            return
        served = self._mixture.rows_taken(num_windows)
        fractions = zip(*(mixture.fractions for mixture in self._mixture.mixtures), strict=True)
        for name, stages, rows, windows in zip(self._all, fractions, served, self._windows, strict=True):
            requested = ' then '.join(f'{fraction:.2%}' for fraction in stages)
            text = f'source {name}: share {requested} requested, {rows / num_windows:.2%} actual; '
            if windows is None:
                logger.info(f'{text}it is still being prepared')
                continue
            epochs = rows / windows
            logger.info(f'{text}{windows:,} windows, {epochs:.3g} epochs in this run')
            if epochs > self._warn_epochs:
                logger.warning(
                    f'source {name} is repeated {epochs:.1f} times, more than data.warn_epochs={self._warn_epochs:g}: '
                    f'the model may memorize it; lower its weight or add more text'
                )

    def training_metrics(self, num_windows: int, losses: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
        """See `SourceMetrics`."""
        metrics = self._metrics_by_source('train', means(losses, tokens), tokens)
        if self._weighted:
            served = self._mixture.rows_taken(num_windows)
            for name, rows, windows in zip(self._names, served, self._windows, strict=True):
                metrics[f'data/fraction/{name}'] = rows / num_windows
                if windows is not None:
                    metrics[f'data/epoch/{name}'] = rows / windows
        return metrics

    def evaluation_metrics(self, losses: Sequence[float], tokens: Sequence[float]) -> dict[str, float]:
        """See `SourceMetrics`."""
        return self._metrics_by_source('eval', losses, tokens)

    def _metrics_by_source(
        self, prefix: str, losses: Sequence[float], tokens: Sequence[float] | np.ndarray
    ) -> dict[str, float]:
        counted = [row for row in zip(self._names, losses, tokens, strict=True) if row[2]]
        return {
            **{f'{prefix}/loss/{name}': loss for name, loss, _ in counted},
            **{f'{prefix}/tokens/{name}': float(count) for name, _, count in counted},
        }
