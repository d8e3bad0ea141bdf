import numpy as np
import pytest

from maxlm.data.chat import packing
from maxlm.data.chat.packing import ChatCounts, Packer
from maxlm.data.chat.token_flags import TokenDocument, encode_flags, is_document_start, is_target, token_ids

END = 0


def conversation(number, *turns):
    """Returns turns of the given lengths, which repeat the token id `number`. The last token of a turn is a target."""
    stops = np.cumsum(turns)
    predicted = np.zeros(stops[-1] + 1, bool)
    predicted[stops - 1] = True
    tokens = encode_flags(np.append(np.full(stops[-1], number, np.uint32), np.uint32(END)), predicted)
    return TokenDocument(tokens, tuple(stops.tolist()))


def packed(documents, window):
    """Returns the packed sequences [n, window] and the counts."""
    counts = ChatCounts()
    packer = Packer(window, end_of_document=END, counts=counts)
    parts = [part for document in documents for part in packer.add(document)] + packer.finish()
    return np.concatenate(parts).reshape(-1, window), counts, parts


def random_conversations(count, longest, seed=3):
    rng = np.random.default_rng(seed)
    return [conversation(i + 1, *rng.integers(2, longest, rng.integers(1, 4))) for i in range(count)]


@pytest.mark.parametrize('open_windows', [1, 4, 512])
def test_complete_conversations_are_packed(open_windows, monkeypatch):
    monkeypatch.setattr(packing, 'MAX_OPEN_SEQUENCES', open_windows)
    documents = random_conversations(300, 12)
    windows, counts, parts = packed(documents, 64)
    assert (counts.shortened, counts.left_out) == (0, 0)
    assert len(parts) == len(documents)
    found = {}
    for window in windows:
        assert is_document_start(window)[0]
        starts = np.flatnonzero(is_document_start(window))
        for piece in np.split(window, starts[1:]):
            found.setdefault(int(token_ids(piece)[0]), []).append(piece)
    padding = found.pop(END, [])
    for document in documents:
        (piece,) = found.pop(int(token_ids(document.tokens)[0]))
        np.testing.assert_array_equal(piece, document.tokens)
    assert found == {}
    # Padding is one segment of a sequence and contains no targets.
    assert sum(map(len, padding)) == counts.padding
    assert not is_target(np.concatenate(padding)).any()
    total = sum(len(document.tokens) for document in documents)
    assert counts.padding == windows.size - total
    share = counts.padding / windows.size
    assert share < {1: 0.3, 4: 0.15, 512: 0.05}[open_windows]


def test_each_conversation_goes_to_the_fullest_window_that_fits():
    sizes = [60, 50, 10, 3, 12]
    windows, counts, _ = packed([conversation(size, size - 1) for size in sizes], 64)
    assert [sorted(set(token_ids(window).tolist()) - {END}) for window in windows] == [[3, 60], [10, 50], [12]]
    assert counts.padding == 3 * 64 - sum(sizes)


def test_long_conversations_are_truncated_at_a_turn():
    documents = [
        conversation(1, 10, 10, 5),  # 26 tokens with the end token; 21 to 25 tokens fit two turns and an end token
        conversation(2, 30, 2),  # the first turn does not fit
    ]
    windows, counts, _ = packed(documents, 22)
    assert token_ids(windows).tolist() == [[1] * 20 + [END] * 2]
    assert is_target(windows[0]).nonzero()[0].tolist() == [9, 19]
    assert (counts.shortened, counts.left_out, counts.padding) == (1, 1, 1)
    assert is_document_start(windows[0]).nonzero()[0].tolist() == [0, 21]
    # With one token less, the end no longer fits after the second turn.
    windows, counts, _ = packed(documents, 20)
    assert token_ids(windows).tolist() == [[1] * 10 + [END] * 10]
    # A conversation that fits exactly is not trimmed.
    windows, counts, _ = packed(documents, 26)
    assert (counts.shortened, counts.padding) == (0, 0)


def test_a_turn_may_end_with_the_end_of_document_token():
    tokens = encode_flags(np.array([5, 5, END, 6, 6, 6, 6, END], np.uint32), np.array([0, 0, 1, 0, 0, 0, 0, 1], bool))
    windows, counts, _ = packed([TokenDocument(tokens, (3, 8))], 4)
    assert token_ids(windows).tolist() == [[5, 5, END, END]]
    assert is_target(windows[0]).tolist() == [False, False, True, False]
    assert (counts.shortened, counts.padding) == (1, 1)
    # A document that fills the sequence gets no second end token.
    assert token_ids(packed([TokenDocument(tokens, (3, 8))], 3)[0]).tolist() == [[5, 5, END]]


def test_long_texts_are_split_into_windows():
    ids = np.append(np.arange(1, 11, dtype=np.uint32), np.uint32(END))
    windows, counts, _ = packed([TokenDocument(encode_flags(ids, np.ones(11, bool)), None)], 4)
    assert token_ids(windows).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, END, END]]
    assert is_document_start(windows).tolist() == [[True, False, False, False]] * 2 + [[True, False, False, True]]
    assert is_target(windows).sum() == 8
    assert (counts.shortened, counts.left_out, counts.padding) == (0, 0, 1)


def test_the_first_token_of_a_sequence_is_a_target_after_the_end_of_a_document():
    def text(first, length):
        ids = np.append(np.arange(first, first + length, dtype=np.uint32), np.uint32(END))
        return TokenDocument(encode_flags(ids, np.ones(length + 1, bool)), None)

    # The second and the third text fill sequences. The rest of the fourth one stays open until the end.
    windows, counts, _ = packed([text(1, 2), text(11, 3), text(21, 3), text(31, 9), text(41, 3)], 4)
    firsts = {int(token_ids(window)[0]): bool(is_target(window)[0]) for window in windows}
    # The first sequence follows nothing, 35 continues a text, and 41 follows a part of a text.
    assert firsts == {11: False, 21: True, 31: True, 35: False, 41: False, 1: True, 39: False}
    assert counts.padding == 1 + 2


def test_counts_add_up():
    counts = ChatCounts(1, 2, 3, 4)
    counts.add(ChatCounts(10, 20, 30, 40))
    assert counts == ChatCounts(11, 22, 33, 44)
