"""Texts that begin alike, put into trees so that a model reads what they share once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Tokens that are worth sharing.
SMALLEST_SHARED = 8
# Tokens of a tree of several texts, at most: attention grows with the square of it.
LARGEST_TREE = 2048


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
    # Of each text: the indices of its tokens.
    paths: list[np.ndarray]


def insert(texts: Sequence[Sequence[int]], *, largest: int = LARGEST_TREE) -> list[Tree]:
    """Every text in one tree, of up to `largest` tokens unless it is of one text; 0: each is alone."""
    arrays = [np.asarray(text, np.int32) for text in texts]
    trees: list[Tree] = []
    for number in sorted(range(len(texts)), key=lambda number: tuple(texts[number])):
        length = len(arrays[number])
        if trees:
            last = trees[-1]
            shared = common_prefix(arrays[last.texts[-1]], arrays[number])
            size = last.size + length - shared
            if shared >= SMALLEST_SHARED and size <= largest:
                trees[-1] = Tree([*last.texts, number], size)
                continue
        trees.append(Tree([number], length))
    return trees


def flatten(texts: Sequence[Sequence[int]]) -> FlattenedTree:
    """The texts of one tree, in the order of their tokens."""
    tokens: list[np.ndarray] = []
    depths: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    size, before = 0, np.zeros(0, np.int32)
    end = np.zeros(sum(map(len, texts)), np.int32)
    path = np.zeros(0, np.int32)
    for text in texts:
        new = np.asarray(text, np.int32)
        shared = common_prefix(before, new)
        # Nobody sees these any more.
        end[path[shared:]] = size
        tokens.append(new[shared:])
        depths.append(np.arange(shared, len(new), dtype=np.int32))
        path = np.concatenate([path[:shared], np.arange(size, size + len(new) - shared, dtype=np.int32)])
        paths.append(path)
        size, before = size + len(new) - shared, new
    end[path] = size
    return FlattenedTree(np.concatenate(tokens), end[:size], np.concatenate(depths), paths)


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Tokens that two texts begin with in common."""
    num = min(len(first), len(second))
    differs = np.flatnonzero(first[:num] != second[:num])
    return int(differs[0]) if len(differs) else num
