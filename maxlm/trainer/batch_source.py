"""What a run learns from and is evaluated on, as the loop sees it: a corpus, or what the model itself writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from maxlm.config.schema import Config
from maxlm.data.loader.batches import iterate
from maxlm.data.loader.dataset import TrainingData
from maxlm.data.loader.skipped_batches import SkippingBatches, data_index
from maxlm.data.loader.windows import Batch
from maxlm.evaluation.validation import Evaluation, Validation
from maxlm.parallel.layout import Layout
from maxlm.planning.cost import FORWARD_SHARE
from maxlm.trainer.samples import Sample, Samples
from maxlm.trainer.source_metrics import SourceMetrics, SourceStats
from maxlm.training.run_control import RunControl
from maxlm.training.state import Params, TrainState


@contextlib.contextmanager
def prefetched_batches(
    start: int,
    config: Config,
    decisions: RunControl,
    *,
    corpus: TrainingData,
    layout: Layout,
    alarm: Callable[[str], None],
) -> Iterator[Iterator[Batch]]:
    """While entered, this process's share of the batches of the steps after `start`.

    Args:
        start: number of the last step that is done.
        config: resolved.
        decisions: of the run so far, for what it leaves out.
        corpus: where the batches are from.
        layout: of the run's devices.
        alarm: told of a bucket that does not answer.
    """
    skips, global_batch, num_steps = decisions.skips, config.train.global_batch_size, config.train.num_steps
    cuts = tuple((data_index(first, skips), config.data.seq_len // window) for first, window in config.contexts)
    data = corpus.train_batches(global_batch, layout.local_rows(global_batch), cuts)
    with (
        corpus.fetcher(data, data_index(start, skips), alarm) as fetcher,
        contextlib.closing(iterate(SkippingBatches(data, skips), start, config.data, num_steps)) as batches,
    ):
        if fetcher is None:
            yield batches
            return

        def make_room() -> Iterator[Batch]:
            for step, batch in enumerate(batches, start):
                # Of what earlier steps read.
                fetcher.advance(data_index(step, skips))
                yield batch

        yield make_room()


class SourceUpdate(NamedTuple):
    """What a source has to say of what it did before a step."""

    metrics: dict[str, float]
    # For the log.
    text: str
    samples: list[Sample]


class BatchSource(Protocol):
    """What the loop asks for."""

    # Sources whose losses are told apart.
    names: tuple[str, ...]
    # Rows of an epoch.
    windows_per_epoch: int
    # Beside it may lie a chat template.
    tokenizer_path: Path

    def fingerprint(self, global_batch: int) -> dict[str, Any]:
        """All that the order of the batches depends on, for a checkpoint: flat and JSON-able."""

    def facts(self, global_batch: int) -> dict[str, Any]:
        """What the event `started` tells of the data: the fingerprint and more."""

    def open(self, config: Config, layout: Layout) -> None:
        """Makes ready, before the first step, what evaluates and samples; InputError where that cannot be."""

    def batches(
        self, start: int, config: Config, decisions: RunControl, *, layout: Layout, alarm: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """While entered, this process's share of the batches of the steps after `start`; see `prefetched_batches`."""

    def has_work_before(self, step: int) -> bool:
        """Whether `prepare` has something to do."""

    def prepare(self, step: int, state: TrainState) -> SourceUpdate:
        """Makes the batches of this step, and perhaps of further ones, from the state before it."""

    def can_checkpoint_after(self, step: int) -> bool:
        """Whether a run can go on from the state after a step, since the next batches depend on no older one."""

    def sources(self) -> SourceMetrics:
        """What is told about sources."""

    @property
    def evaluation_share(self) -> float:
        """What evaluations take, as a share of the steps between two; 0 = there are none."""

    def evaluate(self, state: TrainState) -> Evaluation:
        """Of the parameters that are used."""

    def sample(self, params: Params) -> list[Sample]:
        """What the model writes, for people; none where the config asks for none."""

    def at_end(self) -> str:
        """The end of a run's last line; '' = nothing."""


class TextBatches:
    """A prepared corpus: batches in an order of their own, whatever the state."""

    def __init__(self, corpus: TrainingData):
        self.corpus = corpus
        self.names = corpus.names
        self.windows_per_epoch = corpus.training_windows
        self.tokenizer_path = corpus.first.tokenizer_path
        self._validation: Validation | None = None
        self._samples: Samples | None = None
        self._every = 0
        self._objective = 'next_token'

    def fingerprint(self, global_batch: int) -> dict[str, Any]:
        """See `TrainingData.fingerprint`."""
        return self.corpus.fingerprint(global_batch)

    def facts(self, global_batch: int) -> dict[str, Any]:
        """See `BatchSource`."""
        corpus = self.corpus
        sources = [
            {
                'name': source.name or source.dataset.path.name,
                'tokens': sum(shard.tokens for shard in source.shards('train')),
                'weight': share,
            }
            for source, share in zip(corpus.sources, corpus.mixture.shares, strict=True)
        ]
        return {**corpus.fingerprint(global_batch), 'sources': sources}

    def open(self, config: Config, layout: Layout) -> None:
        """See `BatchSource`."""
        self._objective = config.train.objective
        if not config.eval.interval:
            return
        self._every = config.eval.interval
        self._validation = Validation(config, self.corpus, layout)
        if config.eval.num_samples or config.eval.sample_prompts:
            self._samples = Samples(config, self.corpus, layout)

    def batches(
        self, start: int, config: Config, decisions: RunControl, *, layout: Layout, alarm: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """See `BatchSource`."""
        return prefetched_batches(start, config, decisions, corpus=self.corpus, layout=layout, alarm=alarm)

    def has_work_before(self, step: int) -> bool:
        """Never."""
        del step
        return False

    def prepare(self, step: int, state: TrainState) -> SourceUpdate:
        """Is not called."""
        raise AssertionError(f'the batch of step {step} is there without {type(state).__name__}')

    def can_checkpoint_after(self, step: int) -> bool:
        """Always."""
        del step
        return True

    def sources(self) -> SourceMetrics:
        """See `BatchSource`."""
        return SourceStats(self.corpus)

    @property
    def evaluation_share(self) -> float:
        """See `BatchSource`."""
        return FORWARD_SHARE * len(self._validation) / self._every if self._validation else 0.0

    def evaluate(self, state: TrainState) -> Evaluation:
        """See `BatchSource`."""
        assert self._validation, 'open() made none, since eval.interval is 0'
        return self._validation(state)

    def sample(self, params: Params) -> list[Sample]:
        """See `BatchSource`."""
        return self._samples(params) if self._samples else []

    def at_end(self) -> str:
        """Of next tokens the unit, and the unigram entropy, which a model must beat."""
        if self._objective != 'next_token':
            return ''
        return f' nats/token; unigram entropy of the validation data {self.corpus.unigram_entropy:.3f}'
