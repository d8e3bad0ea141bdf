"""One group of input files → one shard per split, with the counts that the manifest needs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.data.records import FORMAT_VERSION, Shard, ShardWriter, token_dtype
from maxlm.data.sources import Document, InputFile, raise_bad, read_documents
from maxlm.data.splits import name_hash
from maxlm.data.tokenizer import TOKENIZER_FILE, Tokenizer
from maxlm.errors import InputError, os_message

# Characters that are encoded together: enough to keep the encoder busy, little enough for a moving progress bar.
BATCH_CHARACTERS = 2**20

# Called with newly done (bytes of input, documents, tokens).
OnProgress = Callable[[int, int, int], None]


@dataclasses.dataclass(frozen=True)
class Group:
    """What it takes to write a group's shards, in any process.

    Attributes:
        output: directory of the data set; its `tokenizer.json` is there.
        number: place among the groups; names the shards.
        files: input, in order.
        validation_below: documents whose name's hash is below go to validation.
        tokenizer_sha256: checksum of the tokenizer.
        block, text_key, skip_bad: as `maxlm.prepare` takes them.
    """

    output: Path
    number: int
    files: tuple[InputFile, ...]
    validation_below: int
    tokenizer_sha256: str
    block: int
    text_key: str
    skip_bad: bool

    @property
    def result_path(self) -> Path:
        """Where the counts are kept until the data set is complete."""
        return self.output / f'group-{self.number:05d}.json'

    @property
    def identity(self) -> str:
        """Checksum of all that decides what is written."""
        files = [(file.name, file.source, file.kind, file.size, file.mtime_ns) for file in self.files]
        settings = [self.validation_below, self.tokenizer_sha256, self.block, self.text_key, self.skip_bad]
        return hashlib.sha256(json.dumps([FORMAT_VERSION, files, settings]).encode()).hexdigest()


@dataclasses.dataclass
class SplitCounts:
    """What one group gives to one split.

    Attributes:
        shard: the file, None when the split got no document.
        sources: name → [documents, tokens, text_bytes].
        token_counts: how often each id occurs, [vocab_size].
    """

    shard: Shard | None
    sources: dict[str, list[int]]
    token_counts: list[int]


@dataclasses.dataclass
class GroupResult:
    """What a group gave: counts by split, and names and reasons of what could not be read."""

    splits: dict[str, SplitCounts]
    left_out: list[dict[str, str]]


def write_group(group: Group, on_progress: OnProgress) -> None:
    """Writes the shards of a group and, last, its result.

    Raises:
        InputError: a document cannot be read (unless skip_bad) or a shard cannot be written.
    """
    tokenizer = Tokenizer.load(group.output / TOKENIZER_FILE)
    left_out: list[dict[str, str]] = []
    with contextlib.ExitStack() as stack:
        splits = {name: _SplitOutput(name, group, tokenizer, stack) for name in ('train', 'validation')}
        for file in group.files:
            progress_left = file.size
            for documents in _batched(_read(file, group, left_out)):
                tokens = [
                    _end(ids, tokenizer.end_of_document) for ids in tokenizer.encode_batch([d.text for d in documents])
                ]
                for document, ids in zip(documents, tokens, strict=True):
                    in_validation = name_hash(document.name) < group.validation_below
                    splits['validation' if in_validation else 'train'].add(document, ids)
                for split in splits.values():
                    split.flush()
                size = min(progress_left, sum(len(document.text) for document in documents))
                progress_left -= size
                on_progress(size, len(documents), sum(map(len, tokens)))
            on_progress(progress_left, 0, 0)
        result = GroupResult({name: split.finish() for name, split in splits.items()}, left_out)
    facts = {'identity': group.identity, **dataclasses.asdict(result)}
    write_atomically(group.result_path, json.dumps(facts))


def read_result(group: Group) -> GroupResult | None:
    """The result of an earlier `write_group` of the very same group whose shards are still there, otherwise None."""
    try:
        facts = json.loads(group.result_path.read_text())
        if facts['identity'] != group.identity:
            return None
        splits = {name: _parse_counts(counts) for name, counts in facts['splits'].items()}
        for split in splits.values():
            if split.shard is not None and (group.output / split.shard.name).stat().st_size != split.shard.bytes:
                return None
        return GroupResult(splits, facts['left_out'])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_atomically(path: Path, text: str) -> None:
    """Writes a small file, whole or not at all; raises InputError when that fails."""
    partial = path.with_name(f'.{path.name}.partial')
    try:
        with partial.open('w', encoding='utf-8') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f'{path}: cannot be written: {os_message(error)}') from error


class _SplitOutput:
    """The growing shard of one split, opened with its first document, and its counts."""

    def __init__(self, name: str, group: Group, tokenizer: Tokenizer, stack: contextlib.ExitStack):
        self._path = group.output / f'{name}-{group.number:05d}.arrayrecord'
        self._block = group.block
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._stack = stack
        self._writer: ShardWriter | None = None
        self._pending: list[np.ndarray] = []
        self._sources: dict[str, list[int]] = {}
        self._token_counts = np.zeros(tokenizer.vocab_size, np.int64)

    def add(self, document: Document, ids: np.ndarray) -> None:
        # A tokenizer that strips blanks can leave nothing of a text but its end.
        if len(ids) == 1:
            return
        counts = self._sources.setdefault(document.source, [0, 0, 0])
        for i, new in enumerate((1, len(ids), len(document.text.encode()))):
            counts[i] += new
        self._pending.append(ids)

    def flush(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            self._writer = self._stack.enter_context(
                ShardWriter(self._path, source=next(iter(self._sources)), block=self._block, dtype=self._dtype)
            )
        self._writer.write(self._pending)
        self._token_counts += np.bincount(np.concatenate(self._pending), minlength=len(self._token_counts))
        self._pending = []

    def finish(self) -> SplitCounts:
        shard = self._writer.finish() if self._writer else None
        return SplitCounts(shard, self._sources, self._token_counts.tolist())


def _read(file: InputFile, group: Group, left_out: list[dict[str, str]]) -> Iterator[Document]:
    def leave_out(name: str, reason: str) -> None:
        left_out.append({'name': name, 'reason': reason})

    return read_documents(file, text_key=group.text_key, on_bad=leave_out if group.skip_bad else raise_bad)


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _end(ids: np.ndarray, end_of_document: int) -> np.ndarray:
    return np.append(ids, np.uint32(end_of_document))


def _parse_counts(facts: dict[str, Any]) -> SplitCounts:
    shard = facts['shard'] and Shard(**facts['shard'])
    return SplitCounts(shard, facts['sources'], facts['token_counts'])
