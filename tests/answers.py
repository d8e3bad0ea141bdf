"""Packs small prompts and answers like the data pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The token ids of a prompt and its answer; None is the document of one token in place of a missing answer.
Document = tuple[list[int], list[int]] | None
END_OF_DOCUMENT = 0


def pack(*rows: Sequence[Document], length: int = 0) -> dict[str, np.ndarray]:
    """Returns a batch [B, T] of rows of documents. T is at least `length`; the rest of a row is padding."""
    longest = max(sum(len(p + a) + 1 for p, a in (document or ([], []) for document in row)) for row in rows)
    names = ('tokens', 'targets', 'weights', 'segments', 'positions')
    batch = {name: np.zeros((len(rows), max(length, longest)), np.int32) for name in names}
    for row, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents, start=1):
            prompt, answer = document or ([], [])
            stop = start + len(prompt + answer) + 1
            batch['tokens'][row, start:stop] = [*prompt, *answer, END_OF_DOCUMENT]
            batch['weights'][row, start + len(prompt) - 1 : stop - 2] = 1
            batch['segments'][row, start:stop] = number
            batch['positions'][row, start:stop] = np.arange(stop - start)
            start = stop
    batch['targets'][:, :-1] = batch['tokens'][:, 1:]
    return {**batch, 'weights': batch['weights'].astype(np.float32)}
