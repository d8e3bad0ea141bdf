"""Training sequences of a fixed length, into which documents are packed, by number."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from maxlm.data.chat.token_flags import encode_stream_flags, is_document_start, is_target, token_ids
from maxlm.data.dataset.records import Dataset, Shard
from maxlm.data.dataset.token_reader import OPEN_SHARDS, TokenReader

# tokens, targets, weights, segments, positions: each [B, T].
Batch = dict[str, np.ndarray]


class Sequences:
    """Random access to windows of T tokens; picklable.

    Windows do not cross shards: a shard of n tokens gives ceil((n - 1) / T), and its window w holds the tokens
    [w · T, w · T + T) with the targets one further. See `window_batch` for what becomes of them.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        window: int,
        *,
        shards: Sequence[Shard] | None = None,
        isolate_documents: bool = True,
        marked: bool = False,
        fetched: bool = False,
        max_open: int = OPEN_SHARDS,
    ):
        """Opens no file yet.

        Args:
            dataset, split: what is read.
            window: tokens of a window.
            shards: those of the split that are used; None = all.
            isolate_documents: see `window_batch`.
            marked: whether streams are marked although the data set is not, to be in batches with those of one that is.
            fetched, max_open: see `TokenReader`.
        """
        shards = dataset.splits[split].shards if shards is None else shards
        self._reader = TokenReader(dataset, shards, fetched=fetched, max_open=max_open)
        self.window = window
        self._end_of_document = dataset.end_of_document
        self._isolate_documents = isolate_documents
        # Whether streams are of marked tokens.
        self.marked = marked or dataset.masked
        self._adds_flags = marked and not dataset.masked
        # First window of each shard, and one past the last of all.
        self._firsts = list(itertools.accumulate(self.shard_windows, initial=0))

    @property
    def shards(self) -> Sequence[Shard]:
        return self._reader.shards

    @property
    def shard_windows(self) -> list[int]:
        """Number of windows in each shard."""
        return [-((1 - shard.tokens) // self.window) for shard in self._reader.shards]

    def __len__(self) -> int:
        return self._firsts[-1]

    def shard_of(self, number: int) -> int:
        """The shard that a window is in."""
        return bisect.bisect_right(self._firsts, number) - 1

    def stream(self, number: int) -> np.ndarray:
        """The tokens of a window and the last target, as they are stored, or marked: [n + 1], n ≤ T.

        Raises IndexError beyond the last window, InputError when the shard is damaged.
        """
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = self.shard_of(number)
        start = (number - self._firsts[shard]) * self.window
        stop = min(start + self.window + 1, self._reader.shards[shard].tokens)
        stream = self._reader.read(shard, start, stop)
        return encode_stream_flags(stream, self._end_of_document) if self._adds_flags else stream

    def __getitem__(self, number: int) -> Batch:
        """One window, arrays [T]; raises as `stream` does."""
        return {name: rows[0] for name, rows in self.batch([self.stream(number)]).items()}

    def batch(self, streams: Sequence[np.ndarray], *, num_splits: int = 1) -> Batch:
        """`window_batch` of streams of these windows, or of others of the same length and tokenizer."""
        return window_batch(
            streams,
            self.window,
            end_of_document=self._end_of_document,
            isolate_documents=self._isolate_documents,
            marked=self.marked,
            num_splits=num_splits,
        )


def window_batch(
    streams: Sequence[np.ndarray],
    window: int,
    *,
    end_of_document: int,
    isolate_documents: bool,
    marked: bool = False,
    num_splits: int = 1,
) -> Batch:
    """Windows put side by side, each cut into `parts` of T = window / parts tokens: arrays [B, T], B = streams · parts.

        tokens     int32    what the model reads; 0 in padding
        targets    int32    the token that follows each; 0 in padding
        weights    float32  1 where the target counts; 0 after an end of document, which does not tell the next
                            document's first token, and in padding
        segments   int32    1, 2, … the number of the document within the row; 0 in padding
        positions  int32    0, 1, … within the segment; 0 in padding

    Without `isolate_documents` a row is one segment. Marked tokens say themselves what counts and begins a document.

    Args:
        streams: tokens of each window and the last target, [n + 1] with n ≤ window.
        window: tokens that a window may have; a multiple of `parts`.
        end_of_document: id that ends a document.
        isolate_documents: whether the token after an end of document starts a segment.
        marked: whether streams are of marked tokens; see `marks`.
        parts: rows that a window is cut into.
    """
    T = window // num_splits
    full = np.zeros((len(streams), window + 1), np.uint32 if marked else np.int32)
    for number, stream in enumerate(streams):
        full[number, : len(stream)] = stream
    short = [(row, len(stream) - 1) for row, stream in enumerate(streams) if len(stream) <= window]
    if marked:
        counts, begins = is_target(full[:, 1:]), is_document_start(full[:, 1:])
        full = token_ids(full).astype(np.int32)
    else:
        begins = full[:, :-1] == end_of_document
        counts = ~begins
    # Copies: of a single row the slices would share their memory.
    targets = full[:, 1:].copy()
    for row, length in short:
        # The last target is no token that is read.
        full[row, length] = 0
    tokens = full[:, :-1].copy()
    weights = counts.astype(np.float32)
    for row, length in short:
        weights[row, length:] = 0
    # Documents are long: work by document, not by token.
    starts = np.zeros(tokens.size, bool)
    if isolate_documents:
        starts[1:] = begins.reshape(-1)[:-1]
    starts[::T] = True
    firsts = np.flatnonzero(starts)
    lengths = np.diff(firsts, append=tokens.size)
    # How many segments began before the row that each is in.
    before_row = np.searchsorted(firsts, firsts // T * T)
    segments = np.repeat((np.arange(len(firsts)) - before_row + 1).astype(np.int32), lengths).reshape(tokens.shape)
    positions = np.arange(tokens.size, dtype=np.int32) - np.repeat(firsts.astype(np.int32), lengths)
    positions = positions.reshape(tokens.shape)
    for row, length in short:
        segments[row, length:] = 0
        positions[row, length:] = 0
    batch = {'tokens': tokens, 'targets': targets, 'weights': weights, 'segments': segments, 'positions': positions}
    return {name: rows.reshape(-1, T) for name, rows in batch.items()}
