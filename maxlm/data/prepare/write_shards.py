"""Writes the shards of one partition: its filtered and tokenized documents, one file per split, with their counts."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxlm.data.chat.packing import ChatCounts, PairCounts
from maxlm.data.chat.rendered import ChatError, TemplateLimitError
from maxlm.data.chat.template import CHAT_TEMPLATE_FILE
from maxlm.data.chat.token_flags import TokenDocument
from maxlm.data.dataset.records import FORMAT_VERSION, Shard
from maxlm.data.documents.document import Document, encode_each, raise_bad
from maxlm.data.executors.executor import OnProgress
from maxlm.data.filters.report import CleaningReport
from maxlm.data.parts.part_store import WORK_DIRECTORY
from maxlm.data.prepare.choose_validation import ValidationChoice
from maxlm.data.prepare.filter_results import DocumentFilter
from maxlm.data.prepare.partitions import Partition, PartitionTask, ReadSettings, read_batches
from maxlm.data.prepare.scan import DecisionFile
from maxlm.data.prepare.shard_output import MarkedOutput, SplitCounts, SplitOutput
from maxlm.data.prepare.task_results import identity_of, load_result, pack, save_result, unpack
from maxlm.data.tokenizer.fim import FimConfig, encode_documents
from maxlm.data.tokenizer.text_boundaries import TEXT_BOUNDARIES_FILE
from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE, Tokenizer
from maxlm.errors import InputError

if TYPE_CHECKING:
    from maxlm.data.chat.encoder import ChatEncoder

SPLITS = ('train', 'validation')
# Number of conversations that a process may skip because rendering them exceeds a limit. Each takes seconds.
MAX_OVER_LIMIT = 3


@dataclasses.dataclass
class PartitionResult:
    """Result of writing one partition.

    Attributes:
        splits: counts by name of the split.
        skipped: names and reasons of the skipped records.
        duplicates: report on the documents that the filters kept and that were removed as duplicates.
    """

    splits: dict[str, SplitCounts]
    skipped: list[dict[str, str]]
    duplicates: CleaningReport


@dataclasses.dataclass(frozen=True)
class ChatShards:
    """Settings for shards of conversations or preference pairs, whose tokens have flags.

    Attributes:
        template_sha256: checksum of the chat template in the output directory.
        window: tokens per packed sequence; 0 = no packing.
        preferences: True if all documents are preference pairs; False if all are conversations.
    """

    template_sha256: str
    window: int
    preferences: bool = False

    def make_counts(self) -> ChatCounts:
        """Returns counts of zero."""
        return PairCounts() if self.preferences else ChatCounts()


@dataclasses.dataclass(frozen=True)
class WriteShards(PartitionTask):
    """Task that writes the shards of one partition. See `Task`.

    Attributes:
        output: directory of the data set. It contains `tokenizer.json`.
        work: directory of temporary files, which is deleted when the data set is complete.
        partition: the partition.
        reading: settings of the readers.
        decisions: the filter decisions; None keeps all documents.
        filters: names of the filters, which run again on documents that they shorten.
        validation: the choice of validation documents.
        tokenizer_sha256: checksum of the tokenizer.
        boundary_ids: see `Tokenizer.boundary_ids`.
        infill: settings of fill-in-the-middle; None = off.
        block: tokens per record.
        chat: settings for conversations or preference pairs; None = plain text.
    """

    output: Path
    work: Path
    partition: Partition
    reading: ReadSettings
    decisions: DecisionFile | None
    filters: tuple[str, ...]
    validation: ValidationChoice
    tokenizer_sha256: str
    infill: FimConfig | None
    block: int
    chat: ChatShards | None = None
    boundary_ids: Sequence[Sequence[int]] = ()

    @property
    def identity(self) -> str:
        """Checksum of everything that determines the shards."""
        return identity_of(
            FORMAT_VERSION,
            self.partition.identity,
            self.reading.identity,
            self.decisions and self.decisions.identity,
            dataclasses.asdict(self.validation),
            self.tokenizer_sha256,
            *self.boundary_ids,
            self.infill and dataclasses.asdict(self.infill),
            self.block,
            self.chat and dataclasses.asdict(self.chat),
        )

    @property
    def result_path(self) -> Path:
        """Path of the file with the counts, which is deleted when the data set is complete."""
        return self.work / f'group-{self.partition.number:05d}.json'

    def shard_path(self, split: str) -> Path:
        """Returns the path of the shard of a split."""
        return self.output / f'{split}-{self.partition.number:05d}.arrayrecord'

    @property
    def inputs(self) -> tuple[str, ...]:
        """See `PartTask`."""
        decisions = () if self.decisions is None else (self.decisions.name,)
        return (TOKENIZER_FILE, TEXT_BOUNDARIES_FILE, CHAT_TEMPLATE_FILE, *decisions)

    @property
    def result_name(self) -> str:
        """See `PartTask`."""
        return f'{WORK_DIRECTORY}/{self.result_path.name}'

    def in_directory(self, directory: Path) -> WriteShards:
        """See `PartTask`."""
        work, decisions = directory / WORK_DIRECTORY, self.decisions
        if decisions is not None:
            decisions = dataclasses.replace(decisions, path=work / decisions.path.name)
        return dataclasses.replace(self, output=directory, work=work, decisions=decisions)

    def files(self) -> dict[str, int] | None:
        """See `PartTask`."""
        result = self.load()
        if result is None:
            return None
        shards = [split.shard for split in result.splits.values() if split.shard is not None]
        return {shard.name: shard.bytes for shard in shards}

    def is_done(self) -> bool:
        """See `PartTask`."""
        files = self.files()
        try:
            return files is not None and all((self.output / name).stat().st_size == files[name] for name in files)
        except OSError:
            return False

    def run(self, report: OnProgress) -> None:
        """Writes the shards of the partition and then its result. See `Task`.

        Raises:
            InputError: a document cannot be read or encoded and may not be skipped, or a file cannot be written.
            TransientError: the storage fails.
        """
        tokenizer = _load_tokenizer(self.output / TOKENIZER_FILE, self.tokenizer_sha256)
        if tokenizer.boundary_ids != [*map(list, self.boundary_ids)]:
            raise InputError(f'{self.output}: text boundaries changed while maxlm prepare was running; run it again')
        document_filter = DocumentFilter(self.name, self.decisions.load() if self.decisions else None, self.filters)
        # If this process is killed, an old result must not describe the shards that are written now.
        self.result_path.unlink(missing_ok=True)
        skipped: list[dict[str, str]] = []
        with contextlib.ExitStack() as stack:
            splits = {name: self._output(name, tokenizer, stack) for name in SPLITS}
            for read, size in read_batches(self.partition, self.reading, skipped):
                documents = list(self.validation.parts(document_filter.keep(read)))
                num_tokens = 0
                for document, encoded in self._encode(documents, tokenizer, skipped):
                    splits['validation' if self.validation.includes(document.name) else 'train'].add(
                        encoded, document.text
                    )
                    num_tokens += len(encoded.tokens)
                for split in splits.values():
                    split.flush()
                report(size, len(documents), num_tokens)
            document_filter.finish()
            counts = {name: split.finish() for name, split in splits.items()}
        result = {
            'splits': {name: _to_fields(split) for name, split in counts.items()},
            'left_out': skipped,
            'duplicates': document_filter.duplicates.to_json(),
        }
        save_result(self.result_path, self.identity, result)

    def load(self) -> PartitionResult | None:
        """Returns the result of `run`, or None if it is missing or belongs to a different task."""
        result = load_result(self.result_path, self.identity)
        if result is None:
            return None
        try:
            splits = {name: _from_fields(split) for name, split in result['splits'].items()}
            return PartitionResult(splits, result['left_out'], CleaningReport.from_json(result['duplicates']))
        except (ValueError, KeyError, TypeError):
            return None

    def _output(self, split: str, tokenizer: Tokenizer, stack: contextlib.ExitStack) -> SplitOutput:
        arguments: dict[str, Any] = {'source': self.partition.source, 'block': self.block, 'tokenizer': tokenizer}
        if self.chat is None:
            return SplitOutput(self.shard_path(split), **arguments, stack=stack)
        counts = self.chat.make_counts()
        return MarkedOutput(self.shard_path(split), **arguments, stack=stack, window=self.chat.window, counts=counts)

    def _encode(
        self, documents: Sequence[Document], tokenizer: Tokenizer, skipped: list[dict[str, str]]
    ) -> Iterator[tuple[Document, TokenDocument]]:
        """Yields documents with their tokens. Skips documents that cannot be encoded if `skip_bad` is set."""
        encode: Callable[[Sequence[Document]], Sequence[TokenDocument | ChatError]]
        if self.chat is None:
            encode = functools.partial(_encode_texts, tokenizer, infill=self.infill)
        else:
            encoder = _load_encoder(self.output, self.tokenizer_sha256, self.chat.template_sha256)
            most = MAX_OVER_LIMIT if self.reading.skip_bad else 0
            encode = functools.partial(encoder.encode_documents, max_over_limit=most)
        try:
            results = encode_each(encode, documents)
        except TemplateLimitError as error:
            found = f'in {MAX_OVER_LIMIT + 1} conversations, the last is ' if self.reading.skip_bad else ''
            raise InputError(f'{found}{error}; use another chat template, or remove the conversation') from None
        for document, encoded in zip(documents, results, strict=True):
            if isinstance(encoded, TokenDocument):
                yield document, encoded
            elif self.reading.skip_bad:
                skipped.append({'name': document.name, 'reason': str(encoded)})
            else:
                raise_bad(document.name, f'{document.name}: {encoded}')


def _encode_texts(
    tokenizer: Tokenizer, documents: Sequence[Document], *, infill: FimConfig | None
) -> list[TokenDocument]:
    end = np.array([tokenizer.end_of_document], np.uint32)
    beginning = np.array(tokenizer.boundaries.document_beginning, np.uint32)
    encoded = encode_documents(tokenizer, documents, infill)
    return [
        # Token files have the tokens that their author wrote.
        TokenDocument(np.concatenate([beginning if document.tokens is None else ids[:0], ids, end]), None)
        for document, ids in zip(documents, encoded, strict=True)
    ]


@functools.lru_cache(maxsize=1)
def _load_tokenizer(path: Path, sha256: str) -> Tokenizer:
    """Loads the tokenizer once per process: loading a large one is slow."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.sha256 != sha256:
        raise InputError(f'{path}: removed or changed while maxlm prepare was running; run it again')
    return tokenizer


@functools.lru_cache(maxsize=1)
def _load_encoder(directory: Path, tokenizer_sha256: str, template_sha256: str) -> ChatEncoder:
    """Loads the chat encoder once per process."""
    # Plain text does not need Jinja.
    from maxlm.data.chat.encoder import ChatEncoder

    encoder = ChatEncoder.load(directory)
    if (encoder.tokenizer.sha256, encoder.template.sha256) != (tokenizer_sha256, template_sha256):
        raise InputError(f'{directory}: changed while maxlm prepare was running; run it again')
    return encoder


def _to_fields(counts: SplitCounts) -> dict[str, Any]:
    return {
        'shard': counts.shard and dataclasses.asdict(counts.shard),
        'text_bytes': counts.text_bytes,
        'token_counts': pack(counts.token_counts),
        'chat': counts.chat,
    }


def _from_fields(fields: dict[str, Any]) -> SplitCounts:
    shard = fields['shard'] and Shard(**fields['shard'])
    return SplitCounts(shard, fields['text_bytes'], unpack(fields['token_counts']), fields['chat'])


def find_leftover_files(output: Path, kept: Sequence[Shard]) -> list[Path]:
    """Returns the paths of shards in `output` that are not in `kept`. Earlier runs wrote them."""
    names = {shard.name for shard in kept}
    return [path for path in sorted(output.iterdir()) if is_shard_name(path.name) and path.name not in names]


def is_shard_name(name: str) -> bool:
    """Returns True if a file name is that of a shard."""
    return any(fnmatch.fnmatchcase(name, f'{split}-*.arrayrecord') for split in SPLITS)
