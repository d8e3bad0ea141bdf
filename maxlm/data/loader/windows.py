"""Sequence packing of documents: random access to windows, the training sequences of a fixed length."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlm.data.chat.token_flags import are_targets, encode_stream_flags, is_document_start, is_target, token_ids
from maxlm.data.dataset.records import DatasetManifest, Shard
from maxlm.data.dataset.token_reader import OPEN_SHARDS, TokenReader

# Keys tokens, targets, weights, segments, positions; each [B, T].
Batch = dict[str, np.ndarray]


class Sequences:
    """Random access to windows of T tokens. Picklable.

    Windows do not cross shards: a shard of n tokens has ceil((n - 1) / T) windows. Window w contains the tokens
    [w · T, w · T + T) and the targets shifted by one. `window_batch` converts windows to batches.
    """

    def __init__(
        self,
        dataset: DatasetManifest,
        split: str,
        window: int,
        *,
        shards: Sequence[Shard] | None = None,
        isolate_documents: bool = True,
        train_first_token: bool = True,
        beginning_of_document: Sequence[int] | None = None,
        marked: bool = False,
        fetched: bool = False,
        max_open: int = OPEN_SHARDS,
    ):
        """Initializes the windows without opening files.

        Args:
            dataset, split: dataset and split to read.
            window: number of tokens in a window.
            shards: shards of the split to use; None = all.
            isolate_documents, train_first_token: see `window_batch`.
            beginning_of_document: see `window_batch`; None = the ids of the dataset.
            marked: add token flags to streams of a dataset without flags, to mix them with a dataset that has flags.
            fetched, max_open: see `TokenReader`.
        """
        shards = dataset.splits[split].shards if shards is None else shards
        self._reader = TokenReader(dataset, shards, fetched=fetched, max_open=max_open)
        self.window = window
        self._end_of_document = dataset.end_of_document
        self._isolate_documents = isolate_documents
        if beginning_of_document is None:
            beginning_of_document = dataset.beginning_of_document
        self._targets: dict[str, Any] = {
            'train_first_token': train_first_token,
            'beginning_of_document': tuple(beginning_of_document),
        }
        # True if streams contain token flags.
        self.marked = marked or dataset.masked
        self._adds_flags = marked and not dataset.masked
        # First window of each shard, followed by the total number of windows.
        self._firsts = list(itertools.accumulate(self.shard_windows, initial=0))

    @property
    def shards(self) -> Sequence[Shard]:
        return self._reader.shards

    @property
    def shard_windows(self) -> list[int]:
        """Returns the number of windows in each shard."""
        return [-((1 - shard.tokens) // self.window) for shard in self._reader.shards]

    def __len__(self) -> int:
        return self._firsts[-1]

    def shard_of(self, number: int) -> int:
        """Returns the shard that contains a window."""
        return bisect.bisect_right(self._firsts, number) - 1

    def stream(self, number: int) -> np.ndarray:
        """Returns the tokens of a window and the last target, [n + 1] with n ≤ T, with token flags if `marked`.

        Raises:
            IndexError: there is no window of this number.
            InputError: the shard is damaged.
        """
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = self.shard_of(number)
        start = (number - self._firsts[shard]) * self.window
        stop = min(start + self.window + 1, self._reader.shards[shard].tokens)
        stream = self._reader.read(shard, start, stop)
        if not self._adds_flags:
            return stream
        return encode_stream_flags(stream, self._end_of_document, **self._targets)

    def __getitem__(self, number: int) -> Batch:
        """Returns one window as a batch without batch axis, arrays [T]. Raises the same errors as `stream`."""
        return {name: rows[0] for name, rows in self.batch([self.stream(number)]).items()}

    @property
    def end_of_document(self) -> int:
        """Returns the token id that ends a document."""
        return self._end_of_document

    def batch(self, streams: Sequence[np.ndarray], *, num_splits: int = 1) -> Batch:
        """Returns `window_batch` of streams from these windows, or from windows of the same length and tokenizer."""
        return window_batch(
            streams,
            self.window,
            end_of_document=self._end_of_document,
            isolate_documents=self._isolate_documents,
            **self._targets,
            marked=self.marked,
            num_splits=num_splits,
        )


def window_batch(
    streams: Sequence[np.ndarray],
    window: int,
    *,
    end_of_document: int,
    isolate_documents: bool,
    train_first_token: bool = True,
    beginning_of_document: Sequence[int] = (),
    marked: bool = False,
    num_splits: int = 1,
) -> Batch:
    """Returns a batch of windows, each split into rows of T = window / num_splits tokens.

    The arrays have shape [B, T] with B = len(streams) · num_splits:

        tokens     int32    input tokens; 0 in padding
        targets    int32    the next token of each; 0 in padding
        weights    float32  1 where the target counts; 0 in padding, and where the arguments say so
        segments   int32    number of the document within the row, from 1; 0 in padding
        positions  int32    position within the segment, from 0; 0 in padding

    Without `isolate_documents` a row is one segment. The flags of marked tokens determine targets and document starts.

    Args:
        streams: tokens of each window and the last target, [n + 1] with n ≤ window.
        window: maximum number of tokens in a window; a multiple of `num_splits`.
        end_of_document: token id that ends a document.
        isolate_documents: start a new segment after each end-of-document token.
        train_first_token, beginning_of_document: see `are_targets`. Marked tokens ignore both.
        marked: streams contain token flags; see `maxlm.data.chat.token_flags`.
        num_splits: number of rows into which a window is split.
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
        counts = are_targets(
            full,
            end_of_document,
            train_first_token=train_first_token,
            beginning_of_document=beginning_of_document,
        )
    # Copy, because slices of a single row would share memory.
    targets = full[:, 1:].copy()
    for row, length in short:
        # The last target is not an input token.
        full[row, length] = 0
    tokens = full[:, :-1].copy()
    weights = counts.astype(np.float32)
    for row, length in short:
        weights[row, length:] = 0
    # Vectorize over documents, which are long, instead of tokens.
    starts = np.zeros(tokens.size, bool)
    if isolate_documents:
        starts[1:] = begins.reshape(-1)[:-1]
    starts[::T] = True
    firsts = np.flatnonzero(starts)
    lengths = np.diff(firsts, append=tokens.size)
    # Number of segments that began before the row of each segment.
    before_row = np.searchsorted(firsts, firsts // T * T)
    segments = np.repeat((np.arange(len(firsts)) - before_row + 1).astype(np.int32), lengths).reshape(tokens.shape)
    positions = np.arange(tokens.size, dtype=np.int32) - np.repeat(firsts.astype(np.int32), lengths)
    positions = positions.reshape(tokens.shape)
    for row, length in short:
        segments[row, length:] = 0
        positions[row, length:] = 0
    batch = {'tokens': tokens, 'targets': targets, 'weights': weights, 'segments': segments, 'positions': positions}
    return {name: rows.reshape(-1, T) for name, rows in batch.items()}


def mean_segment_length(segments_BT: np.ndarray) -> float:
    """Returns the mean number of tokens of the documents of a batch, or of their parts in a window.

    Args:
        segments_BT: number of the document of each token in its row; 0 for padding.
    """
    is_token_BT = segments_BT > 0
    is_first_BT = is_token_BT.copy()
    is_first_BT[:, 1:] &= segments_BT[:, 1:] != segments_BT[:, :-1]
    return float(is_token_BT.sum() / max(1, is_first_BT.sum()))
