from __future__ import annotations

import numpy as np

from maxlm.data.chat.token_flags import encode_flags, encode_stream_flags, is_document_start, is_target, token_ids

END = 9


def test_a_marked_document_has_its_ids_and_says_what_is_learned():
    ids = np.array([5, 0, (1 << 30) - 1, END], np.uint32)
    marked = encode_flags(ids, np.array([True, False, True, False]))
    assert marked.dtype == np.uint32
    np.testing.assert_array_equal(token_ids(marked), ids)
    # The first token is never a target.
    assert is_target(marked).tolist() == [False, False, True, False]
    assert is_document_start(marked).tolist() == [True, False, False, False]
    assert ids.tolist() == [5, 0, (1 << 30) - 1, END]
    assert encode_flags(ids[:0], np.zeros(0, bool)).tolist() == []


def test_a_stream_is_marked_by_its_ends():
    stream = np.array([5, END, 6, 7, END, END, 8], np.uint16)
    marked = encode_stream_flags(stream, END)
    np.testing.assert_array_equal(token_ids(marked), stream)
    assert is_document_start(marked).tolist() == [False, False, True, False, False, True, True]
    assert (is_target(marked) == ~is_document_start(marked)).all()
