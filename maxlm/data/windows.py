"""Windows: the fixed-length training sequences of a split, by index."""

from __future__ import annotations

import bisect

import numpy as np

from maxlm.data.records import Dataset, TokenReader


class Windows:
    """Random access to windows of T tokens; picklable.

    Windows do not cross shards: a shard of n tokens gives ceil((n - 1) / T), and its window w holds the tokens
    [w · T, w · T + T) with the targets one further. A window is a dict of arrays [T]:

        tokens     int32    what the model reads; 0 in padding
        targets    int32    the token that follows each; 0 in padding
        weights    float32  1 where the target counts; 0 after an end of document, which does not tell the next
                            document's first token, and in padding
        segments   int32    1, 2, … the number of the document within the window; 0 in padding
        positions  int32    0, 1, … within the segment

    Without `isolate_documents` a window is one segment.
    """

    def __init__(self, dataset: Dataset, split: str, window: int, *, isolate_documents: bool = True):
        self._reader = TokenReader(dataset, split)
        self._window = window
        self._end_of_document = dataset.end_of_document
        self._isolate_documents = isolate_documents
        # First window of each shard, and one past the last of all.
        self._firsts = [0]
        for shard in self._reader.shards:
            self._firsts.append(self._firsts[-1] - (1 - shard.tokens) // window)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Raises IndexError beyond the last window, InputError when the shard is damaged."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect.bisect_right(self._firsts, index) - 1
        start = (index - self._firsts[shard]) * self._window
        stop = min(start + self._window + 1, self._reader.shards[shard].tokens)
        stream = self._reader.read(shard, start, stop)
        tokens, targets = stream[:-1], stream[1:]
        ends = tokens == self._end_of_document
        index_in_window = np.arange(len(tokens), dtype=np.int32)
        # The token after an end of document starts a segment.
        starts = np.zeros(len(tokens), bool)
        if self._isolate_documents:
            starts[1:] = ends[:-1]
        return {
            'tokens': self._pad(tokens),
            'targets': self._pad(targets),
            'weights': self._pad((~ends).astype(np.float32)),
            'segments': self._pad(1 + np.cumsum(starts, dtype=np.int32)),
            'positions': self._pad(index_in_window - np.maximum.accumulate(np.where(starts, index_in_window, 0))),
        }

    def _pad(self, values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, self._window - len(values)))
