from __future__ import annotations

import numpy as np

from maxlm.data.chat.token_flags import ids_of, is_first, is_predicted, mark, mark_stream

END = 9


def test_a_marked_document_has_its_ids_and_says_what_is_learned():
    ids = np.array([5, 0, (1 << 30) - 1, END], np.uint32)
    marked = mark(ids, np.array([True, False, True, False]))
    assert marked.dtype == np.uint32
    np.testing.assert_array_equal(ids_of(marked), ids)
    # The first never is.
    assert is_predicted(marked).tolist() == [False, False, True, False]
    assert is_first(marked).tolist() == [True, False, False, False]
    assert ids.tolist() == [5, 0, (1 << 30) - 1, END]
    assert mark(ids[:0], np.zeros(0, bool)).tolist() == []


def test_a_stream_is_marked_by_its_ends():
    stream = np.array([5, END, 6, 7, END, END, 8], np.uint16)
    marked = mark_stream(stream, END)
    np.testing.assert_array_equal(ids_of(marked), stream)
    assert is_first(marked).tolist() == [False, False, True, False, False, True, True]
    assert (is_predicted(marked) == ~is_first(marked)).all()
