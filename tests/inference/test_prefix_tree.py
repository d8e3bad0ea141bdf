"""Tests the grouping of texts into prefix trees and the positions of their tokens."""

import numpy as np
import pytest

from maxlm.inference import prefix_tree
from maxlm.inference.prefix_tree import Tree, common_prefix, flatten, insert
from maxlm.model.smear import NO_TOKEN

START = list(range(100, 110))


def test_texts_with_a_common_prefix_form_one_tree():
    texts = [[*START, 3], [1, 2], [*START, 2, 2], [*START[:8], 5], START, [*START[:7], 5]]
    found = insert(texts)
    # Texts are sorted by their tokens; a prefix of seven tokens is too short to share.
    assert found == [Tree([1], 2), Tree([5], 8), Tree([3, 4, 2, 0], 9 + 2 + 2 + 1)]
    assert insert(texts, max_tokens=0) == [Tree([number], len(texts[number])) for number in (1, 5, 3, 4, 2, 0)]


def test_the_length_of_a_tree_is_limited():
    texts = [[*START, number] for number in range(10)]
    assert [tree.size for tree in insert(texts, max_tokens=14)] == [14, 14, 12]
    # A text longer than a tree gets its own.
    assert [tree.size for tree in insert([[*START, 1], [*START, 2]], max_tokens=9)] == [11, 11]


def seen(laid, index):
    """Returns the indices that a token attends to under the model's rule."""
    return [other for other in range(index + 1) if index < laid.ends[other]]


@pytest.mark.parametrize('seed', range(5))
def test_tokens_attend_to_their_own_text_only(seed, monkeypatch):
    monkeypatch.setattr(prefix_tree, 'MIN_SHARED_TOKENS', 1)
    rng = np.random.default_rng(seed)
    texts = [[7, *rng.integers(0, 3, rng.integers(0, 9)).tolist()] for _ in range(20)]
    texts = [list(text) for text in {tuple(text) for text in texts}]
    (tree,) = insert(texts)
    laid = flatten([texts[number] for number in tree.texts])
    assert (
        len(laid.tokens) == tree.size == len({tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)})
    )
    for number, path in zip(tree.texts, laid.paths, strict=True):
        assert laid.tokens[path].tolist() == texts[number]
        assert laid.depths[path].tolist() == list(range(len(path)))
        assert laid.previous[path].tolist() == [NO_TOKEN, *texts[number][:-1]]
        for depth, index in enumerate(path):
            assert seen(laid, index) == path[: depth + 1].tolist()


def test_common_prefix():
    assert [
        common_prefix(np.array(first), np.array([1, 2, 3])) for first in ([1, 2, 3], [1, 2], [1, 3, 3], [2], [])
    ] == [
        3,
        2,
        1,
        0,
        0,
    ]
