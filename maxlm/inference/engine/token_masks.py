"""Stacks the masks of grammars for a call.

It is no part of `compiled_grammar`, which the processes of grammars import: JAX would take memory in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maxlm.inference.engine.compiled_grammar import ALL_TOKENS, num_words
from maxlm.inference.sampling import TokenMask


def stack_masks(
    masks: Sequence[np.ndarray | None], forced: Sequence[Sequence[int]], *, num_ids: int, max_forced: int
) -> TokenMask:
    """Stacks the masks of rows, None for rows without a grammar, and their forced tokens, up to `max_forced` each."""
    words = np.full((len(masks), num_words(num_ids)), ALL_TOKENS)
    forced_BF = np.full((len(masks), max_forced), -1, np.int32)
    for row, mask in enumerate(masks):
        if mask is not None:
            words[row] = mask[: words.shape[1]]
    for row, tokens in enumerate(forced):
        forced_BF[row, : len(tokens)] = tokens[:max_forced]
    return TokenMask(words, np.array(any(mask is not None for mask in masks)), forced_BF)
