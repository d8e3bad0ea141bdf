"""What a run trains on: one prepared data set, or several with weights."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

from maxlm.config.keys import DataConfig
from maxlm.data.batches import Batches, Part, TrainingRows, ValidationRows
from maxlm.data.mixture import Mixture
from maxlm.data.order import Order
from maxlm.data.records import Dataset, load_manifest
from maxlm.data.tokenizer import Tokenizer
from maxlm.data.windows import Windows
from maxlm.errors import InputError

# Sources whose losses are told apart; a list of files, each a source of its own, can be long.
MAX_SOURCES_TOLD = 64


@dataclasses.dataclass(frozen=True)
class Source:
    """One entry of `data.sources`, or the data set of `data.path`.

    Attributes:
        name: as it stands in logs and metrics.
        dataset: where the shards are.
        only: the one source of the data set whose shards are used; '' = all.
        weight: share of the training rows, relative to the others'.
    """

    name: str
    dataset: Dataset
    only: str
    weight: float

    def windows(self, split: str, data: DataConfig) -> Windows:
        shards = [shard for shard in self.dataset.splits[split].shards if self.only in ('', shard.source)]
        return Windows(self.dataset, split, data.window, shards=shards, isolate_documents=data.isolate_documents)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The data of a run.

    Attributes:
        data: the section of the config that it was opened with.
        sources: one or more, all with the same tokenizer.
        names: what losses and shares are told by: the entries of `data.sources`, or the sources within the data set of
            `data.path`; a single one, or too many, are not told apart and leave it empty.
    """

    data: DataConfig
    sources: tuple[Source, ...]
    names: tuple[str, ...]

    @property
    def first(self) -> Dataset:
        """One of the data sets, for what is the same in all: tokenizer and vocabulary."""
        return self.sources[0].dataset

    @property
    def training_windows(self) -> int:
        """Windows that an epoch has; over several sources, all their windows together."""
        return sum(len(source.windows('train', self.data)) for source in self.sources)

    @property
    def mixture(self) -> Mixture:
        return Mixture([source.weight for source in self.sources], seed=self.data.seed)

    @property
    def validation_counts(self) -> tuple[int, int]:
        """Tokens of the validation data, and bytes of its text as far as they are known."""
        counts = [
            facts
            for source in self.sources
            for name, facts in source.dataset.splits['validation'].sources.items()
            if source.only in ('', name)
        ]
        return sum(facts.tokens for facts in counts), sum(facts.text_bytes for facts in counts)

    @property
    def unigram_entropy(self) -> float:
        """Nats per token of the validation data's token frequencies; over several data sets their mean by tokens."""
        splits = [
            dataset.splits['validation'] for dataset in {s.dataset.path: s.dataset for s in self.sources}.values()
        ]
        tokens = sum(split.tokens for split in splits)
        return sum(split.tokens * split.unigram_entropy for split in splits) / max(tokens, 1)

    def train_batches(
        self, global_batch: int, rows: slice | None = None, context_schedule: tuple[tuple[int, int], ...] = ()
    ) -> Batches:
        """The shuffled, endless batches of the train split. See `Batches` for the arguments.

        Raises:
            InputError: a source has nothing to train on.
        """
        parts = self._parts('train')
        for part, source in zip(parts, self.sources, strict=True):
            if not len(part.windows):
                raise InputError(f'{_told(source)}: the train split is empty; maxlm.prepare needs more text for it')
        orders = [
            # Sources of the same size are not in the same order.
            Order(part.windows.shard_windows, seed=(self.data.seed + number) % 2**32, pool_shards=self.data.pool_shards)
            for number, part in enumerate(parts)
        ]
        return Batches(
            parts,
            TrainingRows(self.mixture, orders),
            global_batch=global_batch,
            rows=rows,
            tell_sources=bool(self.names),
            context_schedule=context_schedule,
        )

    def validation_batches(self, global_batch: int, num_batches: int = 0, rows: slice | None = None) -> Batches:
        """Batches of the validation splits, each window at most once and unweighted; 0 = all of them.

        Fewer are a sample of the whole, always the same one, whatever the run's seed.

        Raises:
            InputError: there is nothing to validate on.
        """
        parts = self._parts('validation')
        if not any(len(part.windows) for part in parts):
            raise InputError(
                f'{_told(self.sources[0])}: the validation split is empty; maxlm.prepare needs more text for it'
            )
        return Batches(
            parts,
            ValidationRows([len(part.windows) for part in parts]),
            global_batch=global_batch,
            rows=rows,
            tell_sources=bool(self.names),
            num_batches=num_batches,
        )

    def fingerprint(self, global_batch: int) -> dict[str, Any]:
        """All that the order of the data depends on, for a checkpoint: flat and JSON-able."""
        if len(self.sources) == 1 and not self.data.sources:
            contents: dict[str, Any] = {'dataset': self.first.fingerprint}
        else:
            contents = {f'dataset {source.name}': source.dataset.fingerprint for source in self.sources}
            contents |= {f'weight {source.name}': source.weight for source in self.sources}
        return {
            **contents,
            'window': self.data.window,
            'seed': self.data.seed,
            'pool_shards': self.data.pool_shards,
            'isolate_documents': self.data.isolate_documents,
            'global_batch': global_batch,
        }

    def _parts(self, split: str) -> list[Part]:
        parts = []
        for number, source in enumerate(self.sources):
            windows = source.windows(split, self.data)
            if self.data.sources:
                names = [number] * len(windows.shards)
            else:
                names = [self.names.index(shard.source) if self.names else 0 for shard in windows.shards]
            parts.append(Part(windows, names))
        return parts


def open_corpus(data: DataConfig, *, tell_sources: bool = True) -> Corpus:
    """The data sets that `data.sources`, or else `data.path`, names; without `tell_sources` none is told apart.

    Raises:
        InputError: one is missing or damaged, has no such source, or they have different tokenizers.
    """
    if not data.sources:
        source = Source('', load_manifest(data.path), '', 1.0)
        names = tuple({shard.source: None for split in source.dataset.splits.values() for shard in split.shards})
        return Corpus(data, (source,), names if tell_sources and 1 < len(names) <= MAX_SOURCES_TOLD else ())
    datasets: dict[str, Dataset] = {}
    for entry, _ in data.sources:
        path = entry.partition('#')[0]
        if path not in datasets:
            datasets[path] = load_manifest(path)
    sources = [
        Source(_name(entry), datasets[entry.partition('#')[0]], entry.partition('#')[2], float(weight))
        for entry, weight in data.sources
    ]
    repeated = [name for name, count in Counter(source.name for source in sources).items() if count > 1]
    if repeated:
        # Two directories of the same name: then their whole paths tell them apart.
        entries = [entry for entry, _ in data.sources]
        sources = [dataclasses.replace(source, name=entry) for source, entry in zip(sources, entries, strict=True)]
    for source in sources:
        _check_source(source)
    for a, b in itertools.pairwise(sources):
        _check_same_tokenizer(a.dataset, b.dataset)
    names = tuple(source.name for source in sources)
    return Corpus(data, tuple(sources), names if tell_sources and len(names) <= MAX_SOURCES_TOLD else ())


def _name(entry: str) -> str:
    path, _, source = entry.partition('#')
    return source or path.rstrip('/').rpartition('/')[2]


def _told(source: Source) -> str:
    return f'{source.dataset.path}#{source.only}' if source.only else str(source.dataset.path)


def _check_source(source: Source) -> None:
    there = {shard.source for shard in source.dataset.splits['train'].shards}
    if source.only and source.only not in there:
        raise InputError(
            f'data.sources: {source.dataset.path} has no source {source.only!r}; it has: {", ".join(sorted(there))}'
        )


def _check_same_tokenizer(a: Dataset, b: Dataset) -> None:
    if a.tokenizer_sha256 == b.tokenizer_sha256:
        return
    # Not byte by byte: a file from elsewhere may be written in another way and mean the same.
    if Tokenizer.load(a.tokenizer_path).sha256 != Tokenizer.load(b.tokenizer_path).sha256:
        raise InputError(
            f'data.sources: {a.path} and {b.path} have different tokenizers; prepare one with --tokenizer '
            f'{a.tokenizer_path} or the other with --tokenizer {b.tokenizer_path}'
        )
