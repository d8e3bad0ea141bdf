"""Batch sources of the training loop: the interface, and its implementation for prepared text."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxlm.config.schema import Config
from maxlm.data.loader.background import background_preparation, hub_entries
from maxlm.data.loader.batches import iterate
from maxlm.data.loader.dataset import TrainingData, check_objective, open_training_data
from maxlm.data.loader.growing import GrowingBatches, WaitHooks
from maxlm.data.loader.skipped_batches import SkippingBatches, data_index
from maxlm.data.loader.windows import Batch, mean_segment_length
from maxlm.data.tokenizer.fim import fim_fraction
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.pair_scores import PairScores
from maxlm.evaluation.samples import Sample, Samples
from maxlm.evaluation.validation import Evaluation, Validation
from maxlm.log import logger
from maxlm.parallel.layout import Layout
from maxlm.planning.cost import FORWARD_FRACTION
from maxlm.runtime.barrier import ProcessGroup, is_shared
from maxlm.trainer.source_metrics import SourceMetrics, SourceStats
from maxlm.training.decisions.run_control import RunControl
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
    on_wait: Callable[[bool], None],
) -> Iterator[Iterator[Batch]]:
    """Opens an iterator over this process's share of the batches of the steps after `start`.

    Args:
        start: number of the last completed step.
        config: resolved config.
        decisions: decisions of the run so far; their `skips` are applied.
        corpus: source of the batches.
        layout: layout of the run's devices.
        alarm: called with a message if a bucket does not respond.
        on_wait: called repeatedly by a main thread that waits for data in preparation; see `WaitHooks.poll`.
    """
    skips, global_batch, num_steps = decisions.skips, config.train.global_batch_size, config.train.num_steps
    cuts = tuple((data_index(first, skips), config.data.seq_len // window) for first, window in config.contexts)
    make = partial(
        TrainingData.train_batches,
        global_batch=global_batch,
        rows=layout.local_rows(global_batch),
        seq_len_schedule=cuts,
        # Unlike the cuts, stages count batches of the data and not steps: otherwise skipped batches would change.
        sources_schedule=config.source_stages,
        teacher=corpus.teacher_outputs(config),
        batch_sizes=decisions.batch_sizes,
        with_scored=config.train.objective == 'reward',
    )
    growing = GrowingBatches(corpus, make) if corpus.training_windows is None else None
    data = growing.available if growing else make(corpus)
    with (
        corpus.fetcher(data, data_index(start, skips), alarm) as fetcher,
        contextlib.closing(iterate(SkippingBatches(growing or data, skips), start, config.data, num_steps)) as batches,
        contextlib.closing(growing) if growing else contextlib.nullcontext(),
    ):
        if fetcher is None and growing is None:
            yield batches
            return
        hooks = WaitHooks(logger.info, on_wait)

        def next_batches() -> Iterator[Batch]:
            for step in itertools.count(start):
                if growing:
                    # Threads that prefetch wait too, but their waits do not delay the step.
                    growing.wait(data_index(step, skips), hooks)
                batch = next(batches, None)
                if batch is None:
                    return
                if fetcher:
                    # Frees the shards of earlier steps.
                    fetcher.advance(data_index(step, skips))
                yield batch

        yield next_batches()


class SourceUpdate(NamedTuple):
    """Report of a source about its work before a step.

    Attributes:
        metrics: metrics to write.
        text: line to log.
        samples: samples to log.
        waits: seconds of the work during which the device waited, by category of the time (`reward_wait`, `tool_wait`).
    """

    metrics: dict[str, float]
    text: str
    samples: list[Sample]
    waits: Mapping[str, float] = MappingProxyType({})


class BatchSource(Protocol):
    """Interface between the training loop and its data.

    Attributes:
        names: names of the sources with separate losses.
        windows_per_epoch: number of rows in an epoch; None if it is unknown, because the data is being prepared.
        tokenizer_path: path of the tokenizer; its directory can also contain a chat template.
        tokenizer: the tokenizer.
        follows_batch_size: True if a run whose batch size has changed continues with the next sequence.
    """

    follows_batch_size: bool = False
    names: tuple[str, ...]
    windows_per_epoch: int | None
    tokenizer_path: Path
    tokenizer: Tokenizer

    def continued(self, config: Config, data: Mapping[str, Any]) -> Config:
        """Returns the config with the values that a run keeps, given the `fingerprint` in its newest checkpoint or {}.

        It also applies them to the source.
        """
        del data
        return config

    def fingerprint(self, config: Config) -> dict[str, Any]:
        """Returns all values that determine the order of the batches, as a flat dict of JSON values."""

    def baseline(self, config: Config) -> dict[str, float]:
        """Returns what the validation losses are compared with, for the event `started`; {} if nothing is known."""
        del config
        return {}

    def source_descriptions(self) -> list[dict[str, Any]]:
        """Returns the name, the weight and the number of tokens of each source, for the event `started`."""

    def open(self, config: Config, layout: Layout) -> None:
        """Prepares evaluation and sampling before the first step. InputError if the config does not allow them."""

    def batches(
        self,
        start: int,
        config: Config,
        decisions: RunControl,
        *,
        layout: Layout,
        alarm: Callable[[str], None],
        on_wait: Callable[[bool], None],
    ) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """Opens an iterator over this process's share of the batches after step `start`; see `prefetched_batches`."""

    def has_work_before(self, step: int) -> bool:
        """Returns True if `prepare` must be called before this step."""
        del step
        return False

    def prepare(self, step: int, state: TrainState) -> SourceUpdate:
        """Generates the batches of this step, and possibly of later steps, from the state before it."""
        raise AssertionError(f'the batch of step {step} does not depend on {type(state).__name__}')

    def can_checkpoint_after(self, step: int) -> bool:
        """Returns True if a run can resume after this step, because the next batches depend on no earlier state."""
        del step
        return True

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Returns arrays, equal in all processes, with which a resumed run continues; {} if none are needed."""
        return {}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continues with the `state_arrays` of the restored checkpoint."""
        del arrays

    def sources(self, config: Config, decisions: RunControl) -> SourceMetrics:
        """Returns the metrics per source."""
        del config, decisions
        return SourceMetrics()

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """Returns metrics of this process's share of a batch, such as the fraction of fill-in-the-middle documents."""
        del batch
        return {}

    @property
    def evaluation_fraction(self) -> float:
        """Returns the expected time of an evaluation relative to the steps between evaluations; 0 if there are none."""
        return 0.0

    def evaluate(self, state: TrainState) -> Evaluation:
        """Evaluates the parameters returned by `evaluated_params`."""

    def sample(self, params: Params) -> list[Sample]:
        """Returns samples of the model for the log; none if the config disables them."""

    def at_end(self) -> str:
        """Returns the last part of the run's final log line, or ''."""
        return ''


class TextBatches(BatchSource):
    """Batches of a prepared corpus, in an order that does not depend on the training state."""

    follows_batch_size = True

    def __init__(self, corpus: TrainingData):
        self.corpus = corpus
        self.names = corpus.names
        self.windows_per_epoch = corpus.training_windows
        self.tokenizer_path = corpus.first.tokenizer_path
        self._validation: Validation | None = None
        self._samples: Samples | PairScores | None = None
        self._every = 0
        self._objective = 'next_token'
        has_fim = any(source.dataset.made_from.get('infill') for source in corpus.sources)
        self.tokenizer = corpus.first.load_tokenizer()
        self._fim_ids = self.tokenizer.infill_ids if has_fim else None

    def continued(self, config: Config, data: Mapping[str, Any]) -> Config:
        """See `BatchSource`. A run keeps `data.train_first_token`; runs that began before this key have False."""
        keeps, key = bool(data.get('train_first_token')), 'data.train_first_token'
        if not data or keeps == config.data.train_first_token:
            return config
        logger.info(f'{key}={keeps}: the run continues as it began; {key}={not keeps} needs a new run')
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, train_first_token=keeps))
        self.corpus = dataclasses.replace(
            self.corpus, data=dataclasses.replace(self.corpus.data, train_first_token=keeps)
        )
        return config

    def fingerprint(self, config: Config) -> dict[str, Any]:
        """See `TrainingData.fingerprint`."""
        return self.corpus.fingerprint(config.train.global_batch_size, config.source_stages)

    def source_descriptions(self) -> list[dict[str, Any]]:
        """See `BatchSource`."""
        corpus = self.corpus
        return [
            {
                'name': source.name or source.dataset.path.name,
                'tokens': sum(shard.tokens for shard in source.shards('train')),
                'weight': fraction,
            }
            for source, fraction in zip(corpus.sources, corpus.data.source_fractions or (1.0,), strict=True)
        ]

    def open(self, config: Config, layout: Layout) -> None:
        """See `BatchSource`."""
        self._objective = config.train.objective
        if not config.eval.interval:
            return
        self._every = config.eval.interval
        self._validation = Validation(config, self.corpus, layout)
        if config.train.objective == 'reward':
            if config.eval.num_samples:
                self._samples = PairScores(config, self.corpus, self.tokenizer, layout)
        elif config.eval.num_samples or config.eval.sample_prompts:
            self._samples = Samples(config, self.corpus, self.tokenizer, layout)

    def batches(
        self,
        start: int,
        config: Config,
        decisions: RunControl,
        *,
        layout: Layout,
        alarm: Callable[[str], None],
        on_wait: Callable[[bool], None],
    ) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """See `BatchSource`."""
        return prefetched_batches(
            start, config, decisions, corpus=self.corpus, layout=layout, alarm=alarm, on_wait=on_wait
        )

    def sources(self, config: Config, decisions: RunControl) -> SourceMetrics:
        """See `BatchSource`."""
        mixture = self.corpus.mixture(config.train.global_batch_size, config.source_stages, decisions.batch_sizes)
        return SourceStats(self.corpus, mixture)

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """See `BatchSource`."""
        metrics = {}
        if self.corpus.data.document_mask:
            metrics['data/document_length'] = mean_segment_length(np.asarray(batch['segments']))
        if self._fim_ids is None:
            return metrics
        end, is_token = self.corpus.first.end_of_document, batch['segments'] > 0
        if self.corpus.data.rows != 'stream':
            # The first token of a row may be the end of no document.
            is_token[:, 0] &= batch['tokens'][:, 0] != end
        return {**metrics, 'data/fim_fraction': fim_fraction(batch['tokens'], is_token, self._fim_ids, end)}

    @property
    def evaluation_fraction(self) -> float:
        """See `BatchSource`."""
        return FORWARD_FRACTION * len(self._validation) / self._every if self._validation else 0.0

    def evaluate(self, state: TrainState) -> Evaluation:
        """See `BatchSource`."""
        assert self._validation, 'open() made none, since eval.interval is 0'
        return self._validation(state)

    def sample(self, params: Params) -> list[Sample]:
        """See `BatchSource`."""
        return self._samples(params) if self._samples else []

    def baseline(self, config: Config) -> dict[str, float]:
        """Returns the unigram entropy in nats per token, and tokens per byte of text if all text sizes are known."""
        if config.train.objective != 'next_token':
            return {}
        tokens, text_bytes = self.corpus.validation_counts
        known = {'unigram_entropy': self.corpus.unigram_entropy} if self.corpus.unigram_entropy else {}
        return {**known, 'tokens_per_byte': tokens / text_bytes} if text_bytes else known

    def at_end(self) -> str:
        """Returns the unit of the loss and the unigram entropy as a baseline, for the objective next_token."""
        if self._objective != 'next_token':
            return ''
        return f' nats/token; unigram entropy of the validation data {self.corpus.unigram_entropy:.3f}'


def open_text(config: Config, stack: contextlib.ExitStack) -> tuple[TextBatches, int]:
    """Opens the data set of a config; see `maxlm.trainer.run.OpenSource`."""
    if config.train.objective == 'grpo':
        raise InputError('train.objective=grpo: not supported by maxlm train; use `maxlm grpo`')
    if hub_entries(config.data):
        _prepare_hub(config, stack)
    corpus = open_training_data(config.data, with_sources=config.metrics.per_source_loss)
    for source in corpus.sources:
        check_objective(config, source.dataset)
    corpus.teacher_outputs(config)
    return TextBatches(corpus), corpus.first.vocab_size


def _prepare_hub(config: Config, stack: contextlib.ExitStack) -> None:
    """Starts the preparation of the hub's data sets in process 0, until the end of the run."""
    together, cache = ProcessGroup(), Path(config.data.cache_dir).expanduser()
    if together.process_index == 0:
        cache.mkdir(parents=True, exist_ok=True)
    together.barrier()
    if not is_shared(cache):
        raise InputError(
            f'data.cache_dir={config.data.cache_dir} is not the same directory for all processes, but process 0 '
            'prepares the data there; set it to a directory that all machines share'
        )
    if together.process_index == 0:
        stack.enter_context(background_preparation(config.data))
    together.barrier()
