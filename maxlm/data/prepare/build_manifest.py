"""Builds the manifest of a data set from the counts of its partitions."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.data.chat.packing import ChatCounts, PairCounts
from maxlm.data.dataset.preparation import Announcer
from maxlm.data.dataset.records import DatasetManifest, Shard, SourceCounts, Split, dataset_fingerprint, token_dtype
from maxlm.data.filters.report import CleaningReport
from maxlm.data.prepare.shard_output import SplitCounts
from maxlm.data.prepare.write_shards import SPLITS, ChatShards, WriteShards
from maxlm.data.tokenizer.text_boundaries import TextBoundaries
from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE, Tokenizer
from maxlm.errors import InputError


def assemble(
    tasks: Sequence[WriteShards],
    tokenizer: Tokenizer,
    *,
    tokenizer_kind: str,
    made_from: dict[str, Any],
    output: Path,
    left_out: Sequence[dict[str, str]] = (),
) -> tuple[DatasetManifest, CleaningReport]:
    """Builds the data set from written partitions.

    Args:
        tasks: the completed tasks of all partitions.
        tokenizer: tokenizer of the data set.
        tokenizer_kind: kind of the tokenizer, for the manifest.
        made_from: provenance of the data set, for the manifest.
        output: directory of the data set.
        left_out: names and reasons of the partitions that were skipped.

    Returns:
        The data set, and the report on removed duplicates.

    Raises:
        InputError: there is no training document, or a shard or result is missing.
    """
    builder = ManifestBuilder(
        tasks[0], tokenizer, tokenizer_kind=tokenizer_kind, made_from=made_from, output=output, left_out=left_out
    )
    for task in tasks:
        builder.add(task)
    return builder.build(), builder.duplicates


class ManifestBuilder:
    """Adds up the results of partitions. They are loaded one at a time, because all of them may not fit into memory.

    Attributes:
        duplicates: report on the removed duplicates.
    """

    def __init__(
        self,
        task: WriteShards,
        tokenizer: Tokenizer,
        *,
        tokenizer_kind: str,
        made_from: dict[str, Any],
        output: Path,
        left_out: Sequence[dict[str, str]] = (),
    ):
        """Creates a builder without partitions. `task` is any of the tasks; see `assemble` for the other arguments."""
        chat, self._block = task.chat, task.block
        self._chat, self._tokenizer, self._kind = chat, tokenizer, tokenizer_kind
        self._made_from, self._output = made_from, output
        self._sums = {
            name: _Sum(tokenizer.vocab_size, ChatCounts() if chat is None else chat.make_counts()) for name in SPLITS
        }
        # The keys are unique: an unreadable file is listed once and not once per range.
        self._reasons = dict.fromkeys((entry['name'], entry['reason']) for entry in left_out)
        self.duplicates = CleaningReport()

    def add(self, task: WriteShards) -> None:
        """Adds the result of a completed task. Raises InputError if it or a shard is missing."""
        result = task.load()
        if result is None:
            raise InputError(f'{task.result_path}: removed or changed while maxlm prepare was running; run it again')
        self._reasons |= dict.fromkeys((entry['name'], entry['reason']) for entry in result.skipped)
        self.duplicates = self.duplicates.merge(result.duplicates)
        for name, counts in result.splits.items():
            self._sums[name].add(task.partition.source, counts)

    @property
    def has_shards(self) -> bool:
        """True if there is a training shard."""
        return bool(self._sums['train'].shards)

    def build(self) -> DatasetManifest:
        """Returns the data set of the added partitions. Raises InputError if there is no training document."""
        chat, tokenizer = self._chat, self._tokenizer
        splits = {name: total.split() for name, total in self._sums.items()}
        if not splits['train'].documents:
            raise InputError(_nothing(self._sums['train'].chat, chat))
        block, dtype = self._block, token_dtype(tokenizer.vocab_size) if chat is None else 'uint32'
        end_of_document = tokenizer.end_of_document
        return DatasetManifest(
            path=self._output,
            tokenizer=self._kind,
            tokenizer_file=TOKENIZER_FILE,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            end_of_document=end_of_document,
            dtype=dtype,
            block=block,
            splits=splits,
            left_out=tuple({'name': name, 'reason': reason} for name, reason in self._reasons),
            made_from=self._made_from,
            fingerprint=dataset_fingerprint(
                block=block,
                dtype=dtype,
                end_of_document=end_of_document,
                splits=splits,
                masked=chat is not None,
                preferences=chat is not None and chat.preferences,
            ),
            **_boundary_fields(tokenizer.boundaries),
            **_chat_fields(chat, self._sums),
        )


class Publisher:
    """Announces the shards of completed partitions: first all validation partitions, then the others in order."""

    def __init__(self, announcer: Announcer, builder: ManifestBuilder, tasks: Sequence[WriteShards]):
        self._announcer, self._builder = announcer, builder
        self._waiting = deque(sorted(tasks, key=lambda task: not task.partition.is_validation))

    def update(self) -> None:
        """Announces the shards up to the first partition that is not complete."""
        before = len(self._waiting)
        while self._waiting and self._waiting[0].is_done():
            self._builder.add(self._waiting.popleft())
        if len(self._waiting) < before and self._builder.has_shards:
            self._announcer.publish(self._builder.build())


def _boundary_fields(boundaries: TextBoundaries) -> dict[str, Any]:
    if boundaries.is_by_name:
        return {}
    return {
        'beginning_of_document': boundaries.document_beginning,
        'text_boundaries_sha256': hashlib.sha256(boundaries.to_json().encode()).hexdigest(),
    }


def _chat_fields(chat: ChatShards | None, sums: dict[str, _Sum]) -> dict[str, Any]:
    if chat is None:
        return {}
    return {
        'masked': True,
        'packed_window': chat.window,
        'chat_template_sha256': chat.template_sha256,
        'chat': {name: dataclasses.asdict(total.chat) for name, total in sums.items()},
        'preferences': chat.preferences,
    }


def _nothing(counts: ChatCounts, chat: ChatShards | None) -> str:
    if isinstance(counts, PairCounts) and chat is not None:
        reasons = {f'{counts.left_out:,} are longer than --pack-seq-len={chat.window}': counts.left_out}
        reasons |= {f'{counts.undecided:,} have equal or empty answers': counts.undecided}
        found = ' and '.join(reason for reason, count in reasons.items() if count) or '--input contains none'
        return f'no preference pair to train on: {found}; use a larger --pack-seq-len or more pairs'
    if chat is not None and counts.left_out:
        return f'--pack-seq-len={chat.window}: no turn of any conversation fits; use a larger value'
    return '--input contains no document to train on; add more text'


def without_duplicates(filtered: CleaningReport, duplicates: CleaningReport) -> CleaningReport:
    """Merges the report of the filters with the report on duplicates, which were removed after the filters."""
    return dataclasses.replace(
        filtered,
        kept_documents=filtered.kept_documents - duplicates.documents,
        kept_bytes=filtered.kept_bytes - duplicates.bytes,
        shortened_documents=filtered.shortened_documents - duplicates.shortened_documents,
        removed={**filtered.removed, **duplicates.removed},
    )


class _Sum:
    """Running totals of one split."""

    def __init__(self, vocab_size: int, chat: ChatCounts):
        self._token_counts = np.zeros(vocab_size, np.int64)
        # Maps a source to [documents, tokens, text_bytes].
        self._sources: dict[str, np.ndarray] = {}
        # Sources with a shard whose text bytes are unknown.
        self._without_text: set[str] = set()
        self.shards: list[Shard] = []
        self.chat = chat

    def add(self, source: str, counts: SplitCounts) -> None:
        shard = counts.shard
        self.chat.add(type(self.chat)(**counts.chat))
        if shard is None:
            return
        self.shards.append(shard)
        self._token_counts += counts.token_counts
        new = np.array([shard.documents, shard.tokens, counts.text_bytes], np.int64)
        self._sources[source] = self._sources.get(source, np.zeros(3, np.int64)) + new
        if not counts.text_bytes:
            self._without_text.add(source)

    def split(self) -> Split:
        documents, tokens, text_bytes = sum(self._sources.values(), np.zeros(3, np.int64)).tolist()
        sources = {}
        for source, counts in self._sources.items():
            num_documents, num_tokens, num_bytes = counts.tolist()
            known_bytes = 0 if source in self._without_text else num_bytes
            sources[source] = SourceCounts(num_documents, num_tokens, known_bytes, share=num_tokens / tokens)
        return Split(
            documents=documents,
            tokens=tokens,
            text_bytes=0 if self._without_text else text_bytes,
            unigram_entropy=_entropy(self._token_counts),
            sources=sources,
            shards=tuple(self.shards),
        )


def _entropy(counts: np.ndarray) -> float:
    """Returns the entropy in nats of a distribution given by counts; 0 if all counts are 0."""
    counts = counts[counts > 0]
    frequencies = counts / max(counts.sum(), 1)
    # abs: a single distinct token gives -0.0.
    return abs(float((frequencies * np.log(frequencies)).sum()))
