"""The shards of one group: its documents, cleaned and tokenized, one file per split, with the counts of each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.data.cleaning.report import CleaningReport
from maxlm.data.documents import Document
from maxlm.data.engine import OnProgress
from maxlm.data.groups import Group, Reading, read_batches
from maxlm.data.infill import Infill, encode_documents
from maxlm.data.records import FORMAT_VERSION, Shard, ShardWriter, token_dtype
from maxlm.data.results import identity_of, load_result, pack, save_result, unpack
from maxlm.data.splits import name_hash
from maxlm.data.survey import VerdictFile
from maxlm.data.tokenizer import TOKENIZER_FILE, Tokenizer
from maxlm.data.verdicts import Sieve
from maxlm.errors import InputError

SPLITS = ('train', 'validation')


@dataclasses.dataclass
class SplitCounts:
    """What one group gives to one split.

    Attributes:
        shard: the file, None when the split got no document.
        text_bytes: bytes of UTF-8; of documents that were tokenized already none are counted.
        token_counts: how often each id occurs, int64 [vocab_size].
    """

    shard: Shard | None
    text_bytes: int
    token_counts: np.ndarray


@dataclasses.dataclass
class GroupResult:
    """What a group gave.

    Attributes:
        splits: counts by name of the split.
        left_out: names and reasons of what could not be read.
        duplicates: which of the documents that the filters kept were removed as duplicates.
    """

    splits: dict[str, SplitCounts]
    left_out: list[dict[str, str]]
    duplicates: CleaningReport


@dataclasses.dataclass(frozen=True)
class WriteShards:
    """The task of writing one group. See `engine.Task`.

    Attributes:
        output: directory of the data set; its `tokenizer.json` is there.
        work: directory for what is needed until the data set is complete.
        group, reading: what is written.
        verdicts: what is kept of it; None = all.
        filters: names of cleaning.filters, run again on documents that they shorten.
        validation_below: documents whose name's hash is below go to validation.
        tokenizer_sha256: checksum of the tokenizer.
        infill: what is rearranged for filling in the middle; None = nothing.
        block: tokens in a record.
    """

    output: Path
    work: Path
    group: Group
    reading: Reading
    verdicts: VerdictFile | None
    filters: tuple[str, ...]
    validation_below: int
    tokenizer_sha256: str
    infill: Infill | None
    block: int

    @property
    def name(self) -> str:
        """See `engine.Task`."""
        return self.group.name

    @property
    def size(self) -> int:
        """See `engine.Task`."""
        return self.group.size

    @property
    def identity(self) -> str:
        """Checksum of all that decides what is written."""
        return identity_of(
            FORMAT_VERSION,
            self.group.identity,
            self.reading.identity,
            self.verdicts and self.verdicts.identity,
            self.validation_below,
            self.tokenizer_sha256,
            self.infill and dataclasses.asdict(self.infill),
            self.block,
        )

    @property
    def result_path(self) -> Path:
        """Where the counts are kept until the data set is complete."""
        return self.work / f'group-{self.group.number:05d}.json'

    def shard_path(self, split: str) -> Path:
        """Where the shard of a split is."""
        return self.output / f'{split}-{self.group.number:05d}.arrayrecord'

    def is_done(self) -> bool:
        """See `engine.Task`."""
        return self.load() is not None

    def run(self, report: OnProgress) -> None:
        """Writes the shards of the group and, last, its result. See `engine.Task`.

        Raises:
            InputError: a document cannot be read (unless it may be left out) or encoded, or a file cannot be written.
            TransientError: the storage fails.
        """
        tokenizer = _load_tokenizer(self.output / TOKENIZER_FILE, self.tokenizer_sha256)
        sieve = Sieve(self.name, self.verdicts.load() if self.verdicts else None, self.filters)
        # An earlier result must not stand for the shards that are written now, if this is killed in between.
        self.result_path.unlink(missing_ok=True)
        left_out: list[dict[str, str]] = []
        with contextlib.ExitStack() as stack:
            splits = {name: _SplitOutput(name, self, tokenizer, stack) for name in SPLITS}
            for read, size in read_batches(self.group, self.reading, left_out):
                documents = sieve.keep(read)
                encoded = encode_documents(tokenizer, documents, self.infill)
                for document, ids in zip(documents, encoded, strict=True):
                    in_validation = name_hash(document.name) < self.validation_below
                    splits['validation' if in_validation else 'train'].add(document, ids)
                for split in splits.values():
                    split.flush()
                report(size, len(documents), sum(map(len, encoded)) + len(encoded))
            sieve.finish()
            counts = {name: split.finish() for name, split in splits.items()}
        facts = {
            'splits': {name: _to_facts(split) for name, split in counts.items()},
            'left_out': left_out,
            'duplicates': sieve.duplicates.to_json(),
        }
        save_result(self.result_path, self.identity, facts)

    def load(self) -> GroupResult | None:
        """What `run` of the very same task wrote, if its shards are still there; otherwise None."""
        facts = load_result(self.result_path, self.identity)
        if facts is None:
            return None
        try:
            splits = {name: _from_facts(split) for name, split in facts['splits'].items()}
            for split in splits.values():
                if split.shard is not None and (self.output / split.shard.name).stat().st_size != split.shard.bytes:
                    return None
            return GroupResult(splits, facts['left_out'], CleaningReport.from_json(facts['duplicates']))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class _SplitOutput:
    """The growing shard of one split, opened with its first document, and its counts."""

    def __init__(self, name: str, task: WriteShards, tokenizer: Tokenizer, stack: contextlib.ExitStack):
        self._path = task.shard_path(name)
        self._source = task.group.source
        self._block = task.block
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.array([tokenizer.end_of_document], np.uint32)
        self._stack = stack
        self._writer: ShardWriter | None = None
        self._pending: list[np.ndarray] = []
        self._text_bytes = 0
        self._token_counts = np.zeros(tokenizer.vocab_size, np.int64)

    def add(self, document: Document, ids: np.ndarray) -> None:
        # A tokenizer that strips blanks can leave nothing of a text but its end.
        if not len(ids):
            return
        self._text_bytes += len(document.text.encode())
        self._pending.append(np.concatenate([ids, self._end]))

    def flush(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            self._writer = self._stack.enter_context(
                ShardWriter(self._path, source=self._source, block=self._block, dtype=self._dtype)
            )
        self._writer.write(self._pending)
        self._token_counts += np.bincount(np.concatenate(self._pending), minlength=len(self._token_counts))
        self._pending = []

    def finish(self) -> SplitCounts:
        shard = self._writer.finish() if self._writer else None
        return SplitCounts(shard, self._text_bytes, self._token_counts)


@functools.lru_cache(maxsize=1)
def _load_tokenizer(path: Path, sha256: str) -> Tokenizer:
    """Kept by a process from one group to the next: a large one takes a while."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.sha256 != sha256:
        raise InputError(f'{path}: removed or changed while maxlm.prepare was running; run it again')
    return tokenizer


def _to_facts(counts: SplitCounts) -> dict[str, Any]:
    return {
        'shard': counts.shard and dataclasses.asdict(counts.shard),
        'text_bytes': counts.text_bytes,
        'token_counts': pack(counts.token_counts),
    }


def _from_facts(facts: dict[str, Any]) -> SplitCounts:
    shard = facts['shard'] and Shard(**facts['shard'])
    return SplitCounts(shard, facts['text_bytes'], unpack(facts['token_counts']))


def left_behind(output: Path, kept: Sequence[Shard]) -> list[Path]:
    """Shards in `output` that earlier runs wrote and that are none of `kept`."""
    names = {shard.name for shard in kept}
    found = [path for split in SPLITS for path in sorted(output.glob(f'{split}-*.arrayrecord'))]
    return [path for path in found if path.name not in names]
