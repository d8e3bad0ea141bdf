"""Tokens at which a reward model scores answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SCORED = 'scored'


def with_scored_tokens(batch: Mapping[str, np.ndarray], end_of_document: int) -> dict[str, np.ndarray]:
    """Returns a batch of packed preference pairs with the array `scored`, float32 [B, T].

    It is 1 at the last token that the chat template writes for each document with an answer, and 0 elsewhere. The
    classes ForSequenceClassification of Transformers score a conversation at the same token. The end-of-document token
    that maxlm appends does not count; it is no target of the loss.

    Args:
        batch: result of `maxlm.data.loader.windows.window_batch`.
        end_of_document: token id that ends a document.
    """
    tokens, segments, positions = (batch[name].copy() for name in ('tokens', 'segments', 'positions'))
    targets, is_target = batch['targets'], batch['weights'] != 0
    B, T = tokens.shape
    # The last token of a shard is only a target, and may be the end of an answer.
    num_inputs = (segments > 0).sum(axis=1)
    for row in np.flatnonzero((num_inputs > 0) & (num_inputs < T)):
        last = num_inputs[row] - 1
        if is_target[row, last]:
            tokens[row, last + 1], segments[row, last + 1] = targets[row, last], segments[row, last]
            positions[row, last + 1] = positions[row, last] + 1
    is_last = (segments > 0) & (np.diff(segments, axis=1, append=0) != 0)
    # True for tokens that are targets of the loss.
    is_answer = np.zeros_like(is_target)
    is_answer[:, 1:] = is_target[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    is_appended = is_last & (tokens == end_of_document) & ~is_answer
    scored = is_last & ~is_appended
    scored[:, :-1] |= is_appended[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    documents = segments + np.arange(B)[:, None] * (T + 1)
    num_targets = np.bincount(documents.ravel(), weights=is_answer.ravel())
    scored &= num_targets[documents] > 0
    return {
        **batch,
        'tokens': tokens,
        'segments': segments,
        'positions': positions,
        SCORED: scored.astype(np.float32),
    }
