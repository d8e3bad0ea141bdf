"""Texts that begin alike, put into trees so that a model reads what they share once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Shared tokens, at least.
MIN_SHARED_TOKENS = 8
# Tokens of a tree of several texts, at most: attention grows with the square of it.
MAX_TREE_TOKENS = 2048


class Tree(NamedTuple):
    """Numbers of texts, in the order of their tokens, and how many tokens they have when shared ones count once."""

    texts: list[int]
    size: int


class FlattenedTree(NamedTuple):
    """A tree's tokens, depth first; arrays are int32 [size], as `maxlm.model.attention.tree.TokenTree` has them."""

    tokens: np.ndarray
    # Index behind the last token that sees this one.
    ends: np.ndarray
    depths: np.ndarray
    # Indices of the tokens of each text.
    paths: list[np.ndarray]


def insert(texts: Sequence[Sequence[int]], *, max_tokens: int = MAX_TREE_TOKENS) -> list[Tree]:
    """Every text in one tree, of up to `max_tokens` tokens unless it is of one text; 0: each is alone."""
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
    """The texts of one tree, in the order of their tokens."""
    tokens: list[np.ndarray] = []
    depths: list[np.ndarray] = []
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
        depths.append(np.arange(shared, len(current), dtype=np.int32))
        path = np.concatenate([path[:shared], np.arange(size, size + len(current) - shared, dtype=np.int32)])
        paths.append(path)
        size, previous = size + len(current) - shared, current
    end[path] = size
    return FlattenedTree(np.concatenate(tokens), end[:size], np.concatenate(depths), paths)


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Tokens that two texts begin with in common."""
    num = min(len(first), len(second))
    differs = np.flatnonzero(first[:num] != second[:num])
    return int(differs[0]) if len(differs) else num
