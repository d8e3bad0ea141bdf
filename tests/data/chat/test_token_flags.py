import numpy as np

from maxlm.data.chat.token_flags import encode_flags, encode_stream_flags, is_document_start, is_target, token_ids

END = 9


def test_flags_keep_ids_and_mark_targets():
    ids = np.array([5, 0, (1 << 30) - 1, END], np.uint32)
    flagged = encode_flags(ids, np.array([True, False, True, False]))
    assert flagged.dtype == np.uint32
    np.testing.assert_array_equal(token_ids(flagged), ids)
    # The first token is a target if the mask says so.
    assert is_target(flagged).tolist() == [True, False, True, False]
    assert not is_target(encode_flags(ids, np.array([False, True, True, True])))[0]
    assert is_document_start(flagged).tolist() == [True, False, False, False]
    assert ids.tolist() == [5, 0, (1 << 30) - 1, END]
    assert encode_flags(ids[:0], np.zeros(0, bool)).tolist() == []


def test_flags_of_a_stream_follow_its_end_tokens():
    stream = np.array([5, END, 6, 7, END, END, 8], np.uint16)
    flagged = encode_stream_flags(stream, END, train_first_token=False)
    np.testing.assert_array_equal(token_ids(flagged), stream)
    assert is_document_start(flagged).tolist() == [False, False, True, False, False, True, True]
    assert (is_target(flagged) == ~is_document_start(flagged)).all()
    trained = encode_stream_flags(stream, END)
    np.testing.assert_array_equal(is_document_start(trained), is_document_start(flagged))
    assert is_target(trained).all()
    assert np.flatnonzero(~is_target(encode_stream_flags(stream, END, beginning_of_document=(6, 8)))).tolist() == [2, 6]
