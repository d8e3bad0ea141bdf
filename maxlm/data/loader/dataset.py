"""Training data of a run: one prepared dataset, or several with weights."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from maxlm.config.schema import Config, DataConfig
from maxlm.data.chat.packing import num_labeled
from maxlm.data.dataset.cache_policy import PlannedRead
from maxlm.data.dataset.records import DatasetManifest
from maxlm.data.dataset.shard_cache import Fetcher
from maxlm.data.loader.batch_rows import BatchRows, Changes
from maxlm.data.loader.batches import Batches, TrainingRows, ValidationRows, WeightedSource
from maxlm.data.loader.document_rows import VERSIONS
from maxlm.data.loader.mixture import Mixture, SourcesSchedule, StagedMixture
from maxlm.data.loader.prefetch_plan import upcoming_reads
from maxlm.data.loader.shuffle import VERSION, ShuffledIndex
from maxlm.data.loader.source import HUB, OpenedDataset, Source, open_dataset, source_name
from maxlm.data.loader.teacher_outputs import TeacherOutputReader, open_teacher_outputs
from maxlm.errors import InputError, name_errors, one_line
from maxlm.storage.retry import OnWarning

# Objectives of `train.objective` that train on preferences.
PREFERENCE_OBJECTIVES = ('dpo', 'reward')


def check_objective(config: Config, dataset: DatasetManifest) -> None:
    """Checks that `train.objective` matches the type of the dataset.

    Raises:
        InputError: the objective needs preference data and the dataset has none, or the reverse; or the loss needs
            pairs and the dataset has single answers with labels.
    """
    objective = config.train.objective
    if objective in PREFERENCE_OBJECTIVES and not dataset.preferences:
        raise InputError(
            f'train.objective={objective}: {dataset.path} contains no preferences; prepare preference pairs with '
            f'--format=preference --pack-seq-len={config.data.seq_len}'
        )
    if objective not in PREFERENCE_OBJECTIVES and dataset.preferences:
        raise InputError(
            f'train.objective={objective}: {dataset.path} contains preferences, whose rejected answers must not be '
            f'trained on; set train.objective to {" or ".join(PREFERENCE_OBJECTIVES)}, or use other data'
        )
    takes_labels = objective not in PREFERENCE_OBJECTIVES or (objective == 'dpo' and config.dpo.takes_labels)
    if not takes_labels and num_labeled(dataset.chat):
        key = f'dpo.loss_type={config.dpo.loss_type}' if objective == 'dpo' else f'train.objective={objective}'
        raise InputError(
            f'{key}: {dataset.path} contains single answers with labels, which form no pairs; set dpo.loss_type=kto '
            'with train.objective=dpo, or use other data'
        )


def check_alike(a: DatasetManifest, b: DatasetManifest) -> None:
    """Raises InputError if only one of two datasets of a mixture contains preference data."""
    if a.preferences != b.preferences:
        preferences, other = (a, b) if a.preferences else (b, a)
        raise InputError(
            f'data.sources: {preferences.path} contains preferences, and {other.path} does not; no objective '
            'trains on both; use one kind of data'
        )


# Maximum number of sources with separate losses; a list of files, each its own source, can be long.
MAX_SOURCES_LISTED = 64


def _warn(line: str) -> None:
    print(f'warning: {one_line(line)}', file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """Training data of a run.

    Attributes:
        data: the data section of the config.
        sources: one or more sources with the same tokenizer.
        names: names under which losses and shares are reported: the entries of `data.sources`, or the sources within
            the dataset of `data.path`. Empty for a single source or too many sources.
    """

    data: DataConfig
    sources: tuple[Source, ...]
    names: tuple[str, ...]

    @property
    def first(self) -> DatasetManifest:
        """Returns the first dataset; tokenizer and vocabulary are the same in all."""
        return self.sources[0].dataset

    @property
    def source_windows(self) -> list[int | None]:
        """Returns the number of windows in one epoch over each source; None if the source is still being prepared."""
        # Rows packed by best fit are refused while the data is being prepared.
        counted = [not source.is_growing or self.data.rows != 'stream' for source in self.sources]
        return [
            len(source.windows('train', self.data)) if is_counted else None
            for source, is_counted in zip(self.sources, counted, strict=True)
        ]

    @property
    def training_windows(self) -> int | None:
        """Returns the number of windows in one epoch over all sources; None if one is still being prepared."""
        counts = [count for count in self.source_windows if count is not None]
        return sum(counts) if len(counts) == len(self.sources) else None

    def mixture(
        self, global_batch: int = 1, sources_schedule: SourcesSchedule = (), batch_sizes: Changes = ()
    ) -> StagedMixture:
        """Returns the mixture of the sources. See `Config.source_stages` for the schedule; () = constant weights."""
        batch_rows = BatchRows.of(global_batch, batch_sizes)
        stages = sources_schedule or ((0, tuple(source.weight for source in self.sources)),)
        return StagedMixture(
            [(batch_rows.first_row(first), Mixture(weights, seed=self.data.seed)) for first, weights in stages]
        )

    @property
    def validation_counts(self) -> tuple[int, int]:
        """Returns the number of tokens and of text bytes in the validation data.

        The number of bytes is 0 if some documents were already tokenized, because their text size is unknown.
        """
        counts = [
            one
            for source in self.sources
            for name, one in source.dataset.splits['validation'].sources.items()
            if source.only in ('', name)
        ]
        known = all(one.text_bytes or not one.tokens for one in counts)
        return sum(one.tokens for one in counts), sum(one.text_bytes for one in counts) if known else 0

    @property
    def unigram_entropy(self) -> float:
        """Returns the unigram entropy of the validation data in nats per token.

        For several datasets, it is their mean weighted by tokens.
        """
        splits = [
            dataset.splits['validation'] for dataset in {s.dataset.path: s.dataset for s in self.sources}.values()
        ]
        tokens = sum(split.tokens for split in splits)
        return sum(split.tokens * split.unigram_entropy for split in splits) / max(tokens, 1)

    def train_batches(
        self,
        global_batch: int,
        rows: slice | None = None,
        seq_len_schedule: tuple[tuple[int, int], ...] = (),
        sources_schedule: SourcesSchedule = (),
        teacher: TeacherOutputReader | None = None,
        batch_sizes: Changes = (),
        with_scored: bool = False,
    ) -> Batches:
        """Returns the shuffled, endless batches of the train split. See `Batches` and `mixture` for the arguments.

        Raises:
            InputError: the train split of a source is empty.
        """
        weighted_sources = self._weighted_sources('train')
        for part, source in zip(weighted_sources, self.sources, strict=True):
            if not len(part.windows):
                raise InputError(
                    f'{source.display_name}: the train split is empty; prepare more text with maxlm prepare'
                )
        orders = [
            # The seed depends on the source, so that sources of the same size have different orders.
            ShuffledIndex(
                part.windows.shard_windows,
                seed=(self.data.seed + number) % 2**32,
                pool_shards=self.data.shuffle_shards,
                in_order=source.dataset.is_streamed,
            )
            for number, (part, source) in enumerate(zip(weighted_sources, self.sources, strict=True))
        ]
        return Batches(
            weighted_sources,
            TrainingRows(self.mixture(global_batch, sources_schedule, batch_sizes), orders),
            global_batch=global_batch,
            rows=rows,
            with_sources=bool(self.names),
            seq_len_schedule=seq_len_schedule,
            teacher=teacher,
            batch_sizes=batch_sizes,
            with_scored=with_scored,
        )

    def teacher_outputs(self, config: Config) -> TeacherOutputReader | None:
        """Returns the stored outputs of a teacher that the config names, if any; see `open_teacher_outputs`.

        Raises:
            InputError: the outputs do not fit, or the data is in a bucket or still being prepared.
        """
        if not config.distill.logits_dir:
            return None
        source = self.sources[0]
        if source.url or source.is_growing:
            raise InputError(
                f'distill.logits_dir={config.distill.logits_dir}: {source.display_name} is not a complete local data '
                'set; copy it to a disk'
            )
        return open_teacher_outputs(config, source.dataset, source.windows('train', self.data))

    def validation_batches(
        self, global_batch: int, num_batches: int = 0, rows: slice | None = None, *, with_scored: bool = False
    ) -> Batches:
        """Returns batches of the validation splits, with each window at most once and without source weights.

        Args:
            global_batch: see `Batches`.
            num_batches: maximum number of batches; 0 = all. A smaller number selects a sample that is always the same,
                independent of the run's seed.
            rows, with_scored: see `Batches`.

        Raises:
            InputError: all validation splits are empty.
        """
        weighted_sources = self._weighted_sources('validation')
        if not any(len(part.windows) for part in weighted_sources):
            raise InputError(
                f'{self.sources[0].display_name}: the validation split is empty; prepare more text with maxlm prepare'
            )
        return Batches(
            weighted_sources,
            ValidationRows([len(part.windows) for part in weighted_sources]),
            global_batch=global_batch,
            rows=rows,
            with_sources=bool(self.names),
            num_batches=num_batches,
            with_scored=with_scored,
        )

    def fetcher(
        self, training: Batches | None, start_step: int, on_warning: OnWarning = _warn
    ) -> Fetcher | contextlib.nullcontext[None]:
        """Returns a fetcher that downloads shards from buckets before the steps of `training` read them.

        It starts at `start_step` and keeps the validation splits in the cache. If all data is local, the result is a
        null context.

        Raises:
            InputError: `data.cache_limit_gib` is too small for the shards of one step.
        """
        if not any(source.url for source in self.sources):
            return contextlib.nullcontext()

        def uses() -> Iterator[PlannedRead]:
            validation = tuple(file for s in self.sources for file in s.remote_files(s.shards('validation')))
            if validation:
                yield PlannedRead(validation, start_step, sys.maxsize)
            if training is None:
                return
            assert isinstance(training.order, TrainingRows)
            shards = [source.shards('train') for source in self.sources]
            for reading in upcoming_reads(training.order, training.batch_rows, start_step):
                files = self.sources[reading.source].remote_files(shards[reading.source][s] for s in reading.shards)
                if files:
                    yield PlannedRead(files, reading.first_step, reading.last_step)

        every = (s.remote_files(s.shards(split)) for s in self.sources for split in ('train', 'validation'))
        with name_errors(
            f'data.cache_limit_gib={self.data.cache_limit_gib:g}, data.shuffle_shards={self.data.shuffle_shards}'
        ):
            return Fetcher(
                uses(),
                on_warning=on_warning,
                capacity_bytes=int(self.data.cache_limit_gib * 2**30),
                threads=self.data.download_threads,
                all_files=itertools.chain(*every),
            )

    def fingerprint(self, global_batch: int, sources_schedule: SourcesSchedule = ()) -> dict[str, Any]:
        """Returns the values that determine the data order, as a flat JSON-compatible dict for a checkpoint."""
        if len(self.sources) == 1 and not self.data.sources:
            contents: dict[str, Any] = {'dataset': self.first.order_fingerprint}
        else:
            contents = {f'dataset {source.name}': source.dataset.order_fingerprint for source in self.sources}
            contents |= {f'weight {source.name}': source.weight for source in self.sources}
        for (_, weights), (stop, _) in itertools.pairwise(sources_schedule):
            contents[f'weights until step {stop}'] = list(weights)
        return {
            **contents,
            'window': self.data.seq_len,
            'seed': self.data.seed,
            'pool_shards': self.data.shuffle_shards,
            'isolate_documents': self.data.document_mask,
            # Absent if False, as in runs that began before this key was added.
            **({'train_first_token': True} if self.data.train_first_token else {}),
            # Absent for rows of the stream, as in runs that began before this key was added.
            **({'rows': self.data.rows, 'packing': VERSIONS[self.data.rows]} if self.data.rows != 'stream' else {}),
            'global_batch': global_batch,
            'order': VERSION,
        }

    def _weighted_sources(self, split: str) -> list[WeightedSource]:
        weighted_sources = []
        # All rows of a batch have the same format, with or without token flags.
        marked = any(source.dataset.masked for source in self.sources)
        # A data set that was prepared by an earlier version has no such ids in its texts.
        beginning = max((source.dataset.beginning_of_document for source in self.sources), key=len)
        for number, source in enumerate(self.sources):
            windows = source.windows(split, self.data, beginning_of_document=beginning, marked=marked)
            if self.data.sources:
                names = [number] * len(windows.shards)
            else:
                names = [self.names.index(shard.source) if self.names else 0 for shard in windows.shards]
            weighted_sources.append(WeightedSource(windows, names))
        return weighted_sources


def open_training_data(data: DataConfig, *, with_sources: bool = True, on_warning: OnWarning = _warn) -> TrainingData:
    """Opens the datasets of `data.sources`, or else of `data.path`.

    Args:
        data: the data section of the config.
        with_sources: report losses separately by source.
        on_warning: called with a message when a bucket does not respond and cached data is used.

    Raises:
        InputError: a dataset is missing or damaged or has no source of the given name; the datasets have different
            tokenizers; or only some contain preferences.
    """
    if not data.sources:
        opened = open_dataset(data.path, data, on_warning)
        _check_packed(opened.dataset, data)
        source = Source('', opened.dataset, '', 1.0, opened.url, opened.is_growing)
        shards = [shard for split in source.dataset.splits.values() for shard in split.shards]
        # The sources of a streamed dataset are not known before its preparation ends.
        names = () if source.dataset.is_streamed else tuple({shard.source: None for shard in shards})
        return TrainingData(data, (source,), names if with_sources and 1 < len(names) <= MAX_SOURCES_LISTED else ())
    datasets: dict[str, OpenedDataset] = {}
    sources = []
    for entry, weight in data.sources:
        path, _, only = entry.partition('#')
        if path.startswith(HUB):
            path, only = entry, ''
        datasets[path] = opened = datasets.get(path) or open_dataset(path, data, on_warning)
        name = source_name(entry)
        sources.append(Source(name, opened.dataset, only, float(weight), opened.url, opened.is_growing))
    repeated = [name for name, count in Counter(source.name for source in sources).items() if count > 1]
    if repeated:
        # Directories with the same name are distinguished by their full paths.
        entries = [entry for entry, _ in data.sources]
        sources = [dataclasses.replace(source, name=entry) for source, entry in zip(sources, entries, strict=True)]
    for source in sources:
        _check_source(source)
        _check_packed(source.dataset, data)
    for a, b in itertools.pairwise(sources):
        check_alike(a.dataset, b.dataset)
        check_same_tokenizer(a.dataset, b.dataset)
    names = tuple(source.name for source in sources)
    return TrainingData(data, tuple(sources), names if with_sources and len(names) <= MAX_SOURCES_LISTED else ())


def _check_source(source: Source) -> None:
    there = {shard.source for shard in source.dataset.splits['train'].shards}
    if source.only and source.only not in there:
        raise InputError(
            f'data.sources: {source.dataset.path} has no source {source.only!r}; available: {", ".join(sorted(there))}'
        )


def _check_packed(dataset: DatasetManifest, data: DataConfig) -> None:
    packed = dataset.packed_window
    if packed and data.seq_len != packed:
        raise InputError(
            f'data.seq_len={data.seq_len}: {dataset.path} was packed into sequences of {packed} tokens; set '
            f'data.seq_len={packed}, or prepare it with --pack-seq-len={data.seq_len}'
        )
    if packed and data.seq_len_schedule:
        raise InputError(
            f'data.seq_len_schedule: {dataset.path} was packed into sequences of {packed} tokens, which cannot '
            'be cut; prepare it without --pack-seq-len'
        )


def check_same_tokenizer(a: DatasetManifest, b: DatasetManifest) -> None:
    """Raises InputError unless two data sets have the same ids, and documents with the same boundaries."""
    # Compare the loaded tokenizers: equivalent files from other tools can differ in their bytes.
    is_same = a.tokenizer_sha256 == b.tokenizer_sha256 or (
        a.load_tokenizer().ids_sha256 == b.load_tokenizer().ids_sha256
    )
    # Data sets of earlier versions have no beginning of text.
    beginnings = {each.beginning_of_document for each in (a, b)} - {()}
    if is_same and a.end_of_document == b.end_of_document and len(beginnings) < 2:
        return
    what = 'have different tokenizers' if not is_same else 'begin or end documents with different tokens'
    raise InputError(
        f'data.sources: {a.path} and {b.path} {what}; prepare one with --tokenizer '
        f'{a.tokenizer_path} or the other with --tokenizer {b.tokenizer_path}'
    )
