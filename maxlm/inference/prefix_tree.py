"""Prefix trees of token sequences: the model reads a shared prefix once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxlm.model.smear import NO_TOKEN

# Minimum length of a shared prefix, in tokens.
MIN_SHARED_TOKENS = 8
# Maximum size of a tree with several texts, in tokens: attention cost is quadratic in it.
MAX_TREE_TOKENS = 2048


class Tree(NamedTuple):
    """A group of texts that share prefixes.

    Attributes:
        texts: indices of the texts, sorted by their tokens.
        size: number of tokens, with shared tokens counted once.
    """

    texts: list[int]
    size: int


class FlattenedTree(NamedTuple):
    """Tokens of a tree in depth-first order. Arrays are int32 [size], as in `maxlm.model.attention.tree.TokenTree`.

    Attributes:
        tokens: token ids.
        ends: end (exclusive) of the range of tokens that attend to each token.
        depths: depth of each token, which is its position in its texts.
        previous: id of the token before each token in its texts, or `maxlm.model.smear.NO_TOKEN`.
        paths: for each text, the indices of its tokens.
    """

    tokens: np.ndarray
    ends: np.ndarray
    depths: np.ndarray
    previous: np.ndarray
    paths: list[np.ndarray]


def insert(texts: Sequence[Sequence[int]], *, max_tokens: int = MAX_TREE_TOKENS) -> list[Tree]:
    """Groups texts into prefix trees.

    Args:
        texts: token ids of each text.
        max_tokens: maximum size of a tree with several texts; 0 = one tree per text.

    Returns:
        Trees that contain each text exactly once.
    """
    arrays = [np.asarray(text, np.int32) for text in texts]
    trees: list[Tree] = []
    for number in sorted(range(len(texts)), key=lambda number: tuple(texts[number])):
        length = len(arrays[number])
        if trees:
            last = trees[-1]
            shared = common_prefix(arrays[last.texts[-1]], arrays[number])
            size = last.size + length - shared
            if shared >= MIN_SHARED_TOKENS and size <= max_tokens:
                trees[-1] = Tree([*last.texts, number], size)
                continue
        trees.append(Tree([number], length))
    return trees


def flatten(texts: Sequence[Sequence[int]]) -> FlattenedTree:
    """Flattens the texts of one tree, which must be sorted by their tokens."""
    tokens: list[np.ndarray] = []
    depths: list[np.ndarray] = []
    previous_ids: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    size, previous = 0, np.zeros(0, np.int32)
    end = np.zeros(sum(map(len, texts)), np.int32)
    path = np.zeros(0, np.int32)
    for text in texts:
        current = np.asarray(text, np.int32)
        shared = common_prefix(previous, current)
        # No later token attends to these.
        end[path[shared:]] = size
        tokens.append(current[shared:])
        previous_ids.append(np.insert(current, 0, NO_TOKEN)[shared : len(current)])
        depths.append(np.arange(shared, len(current), dtype=np.int32))
        path = np.concatenate([path[:shared], np.arange(size, size + len(current) - shared, dtype=np.int32)])
        paths.append(path)
        size, previous = size + len(current) - shared, current
    end[path] = size
    return FlattenedTree(
        np.concatenate(tokens), end[:size], np.concatenate(depths), np.concatenate(previous_ids), paths
    )


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the length of the common prefix of two token sequences."""
    num = min(len(first), len(second))
    differs = np.flatnonzero(first[:num] != second[:num])
    return int(differs[0]) if len(differs) else num
