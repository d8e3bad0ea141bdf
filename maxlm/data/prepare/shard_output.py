"""Writes the shard of one partition and split, and counts its tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np

from maxlm.data.chat.packing import ChatCounts, Packer, PairCounts
from maxlm.data.chat.token_flags import TokenDocument, is_document_start, is_target, token_ids
from maxlm.data.dataset.records import Shard, token_dtype
from maxlm.data.dataset.shard_writer import ShardWriter
from maxlm.data.tokenizer.tokenizer import Tokenizer


@dataclasses.dataclass
class SplitCounts:
    """Counts of one partition in one split.

    Attributes:
        shard: the shard; None if the split has no documents in this partition.
        text_bytes: size of the text in UTF-8. Pretokenized documents and tokens with flags count as 0.
        token_counts: number of occurrences of each id, int64 [vocab_size]. For tokens with flags, only the targets of
            the loss count.
        chat: fields of `ChatCounts` or `PairCounts` for tokens with flags; empty otherwise.
    """

    shard: Shard | None
    text_bytes: int
    token_counts: np.ndarray
    chat: dict[str, int] = dataclasses.field(default_factory=dict)


class SplitOutput:
    """Writer of a shard. The file is created with the first document and removed if `stack` exits with an exception."""

    def __init__(self, path: Path, *, source: str, block: int, tokenizer: Tokenizer, stack: contextlib.ExitStack):
        self._path = path
        self._source = source
        self._block = block
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._stack = stack
        self._writer: ShardWriter | None = None
        self._pending: list[np.ndarray] = []
        self._text_bytes = 0
        self._token_counts = np.zeros(tokenizer.vocab_size, np.int64)

    def add(self, document: TokenDocument, text: str) -> None:
        """Adds a document and counts the bytes of its text."""
        # A tokenizer that strips whitespace may return only the end-of-document token.
        if len(document.tokens) <= 1:
            return
        self._text_bytes += len(text.encode())
        self._pending.append(document.tokens)

    def flush(self) -> None:
        """Writes the added documents to the shard."""
        if not self._pending:
            return
        if self._writer is None:
            self._writer = self._stack.enter_context(
                ShardWriter(self._path, source=self._source, block=self._block, dtype=self._dtype)
            )
        self._writer.write(self._pending)
        self._count(self._pending)
        self._pending = []

    def finish(self) -> SplitCounts:
        """Completes the shard and returns its counts."""
        self.flush()
        shard = self._writer.finish() if self._writer else None
        return SplitCounts(shard, self._text_bytes, self._token_counts)

    def _count(self, documents: list[np.ndarray]) -> None:
        self._token_counts += np.bincount(np.concatenate(documents), minlength=len(self._token_counts))


class MarkedOutput(SplitOutput):
    """Writer of a shard of tokens with flags, which may be packed into sequences.

    The bytes of text are not counted, because the loss covers only a part of the text.
    """

    def __init__(
        self,
        path: Path,
        *,
        source: str,
        block: int,
        tokenizer: Tokenizer,
        stack: contextlib.ExitStack,
        window: int,
        counts: ChatCounts,
    ):
        """Creates a writer.

        Args:
            path: path of the shard.
            source: name of the source of the documents.
            block: tokens per record.
            tokenizer: tokenizer of the documents.
            stack: context that closes the shard.
            window: tokens per packed sequence; 0 = no packing.
            counts: counts to increment; initially zero.
        """
        super().__init__(path, source=source, block=block, tokenizer=tokenizer, stack=stack)
        self._dtype = 'uint32'
        self._chat = counts
        end = tokenizer.end_of_document
        self._packer = Packer(window, end_of_document=end, counts=self._chat) if window else None

    def add(self, document: TokenDocument, text: str) -> None:
        """Adds a document of tokens with flags. An empty preference pair is counted as undecided."""
        if len(document.tokens) > 1:
            if isinstance(self._chat, PairCounts):
                # Only the document that replaces a missing answer has one token.
                self._chat.labeled += int(is_document_start(document.tokens[[1, -1]]).any())
            self._pending += self._packer.add(document) if self._packer else [document.tokens]
        elif isinstance(self._chat, PairCounts):
            self._chat.undecided += 1

    def finish(self) -> SplitCounts:
        """Pads and writes the open sequences, completes the shard and returns its counts."""
        self._pending += self._packer.finish() if self._packer else []
        counts = super().finish()
        return dataclasses.replace(counts, chat=dataclasses.asdict(self._chat))

    def _count(self, documents: list[np.ndarray]) -> None:
        tokens = np.concatenate(documents)
        predicted = token_ids(tokens[is_target(tokens)])
        self._chat.predicted += len(predicted)
        self._token_counts += np.bincount(predicted, minlength=len(self._token_counts))
