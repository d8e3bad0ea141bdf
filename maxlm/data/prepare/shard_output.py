"""The shard that one group writes of one split, and its counts."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np

from maxlm.data.chat.packing import ChatCounts, Packer, PairCounts
from maxlm.data.chat.token_flags import TokenDocument, is_target, token_ids
from maxlm.data.dataset.records import Shard, ShardWriter, token_dtype
from maxlm.data.tokenizer.tokenizer import Tokenizer


@dataclasses.dataclass
class SplitCounts:
    """What one group gives to one split.

    Attributes:
        shard: the file, None when the split got no document.
        text_bytes: bytes of UTF-8; of documents that were tokenized already none are counted.
        token_counts: how often each id occurs, int64 [vocab_size]; of marked tokens those that are predicted.
        chat: of marked tokens, the counts of `chat_packing.ChatCounts`, or `PairCounts`, by name.
    """

    shard: Shard | None
    text_bytes: int
    token_counts: np.ndarray
    chat: dict[str, int] = dataclasses.field(default_factory=dict)


class SplitOutput:
    """A growing shard, opened with its first document; leaving `stack` with an exception removes it."""

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
        """Takes a document, and the text that it is from."""
        # A tokenizer that strips blanks can leave nothing of a text but its end.
        if len(document.tokens) <= 1:
            return
        self._text_bytes += len(text.encode())
        self._pending.append(document.tokens)

    def flush(self) -> None:
        """Writes what it has taken."""
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
        """Completes the shard."""
        self.flush()
        shard = self._writer.finish() if self._writer else None
        return SplitCounts(shard, self._text_bytes, self._token_counts)

    def _count(self, documents: list[np.ndarray]) -> None:
        self._token_counts += np.bincount(np.concatenate(documents), minlength=len(self._token_counts))


class MarkedOutput(SplitOutput):
    """The same of marked tokens, packed into windows or not.

    The bytes of text stay unknown: the loss is of a part of it only.
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
        """Further arguments than those of others.

        Args:
            window: tokens of the windows that documents are packed into; 0 = they are not packed.
            counts: of nothing yet.
        """
        super().__init__(path, source=source, block=block, tokenizer=tokenizer, stack=stack)
        self._dtype = 'uint32'
        self._chat = counts
        end = tokenizer.end_of_document
        self._packer = Packer(window, end_of_document=end, counts=self._chat) if window else None

    def add(self, document: TokenDocument, text: str) -> None:
        """Takes a document of marked tokens."""
        if len(document.tokens) > 1:
            self._pending += self._packer.add(document) if self._packer else [document.tokens]
        elif isinstance(self._chat, PairCounts):
            self._chat.undecided += 1

    def finish(self) -> SplitCounts:
        """Completes the shard, and the windows that are not full yet."""
        self._pending += self._packer.finish() if self._packer else []
        counts = super().finish()
        return dataclasses.replace(counts, chat=dataclasses.asdict(self._chat))

    def _count(self, documents: list[np.ndarray]) -> None:
        tokens = np.concatenate(documents)
        predicted = token_ids(tokens[is_target(tokens)])
        self._chat.predicted += len(predicted)
        self._token_counts += np.bincount(predicted, minlength=len(self._token_counts))
