"""Tokens at which reward models score answers."""

import numpy as np

from maxlm.data.chat.scored_tokens import with_scored_tokens
from maxlm.data.chat.token_flags import DOCUMENT_START_BIT, IGNORE_BIT
from maxlm.data.loader.windows import window_batch

END = 0


def scored_tokens(*documents, window):
    """Returns (token, segment) of each scored token of a row. A document is a prompt, a learned and another part."""
    stream = []
    for parts in documents:
        tokens = [np.uint32(token) | (0 if part == 1 else IGNORE_BIT) for part in range(3) for token in parts[part]]
        tokens[0] |= DOCUMENT_START_BIT
        stream += tokens
    batch = window_batch(
        [np.array(stream, np.uint32)], window, end_of_document=END, isolate_documents=True, marked=True
    )
    found = with_scored_tokens(batch, END)
    (places,) = np.nonzero(found['scored'][0])
    return [(found['tokens'][0, place], found['segments'][0, place]) for place in places], found


def test_the_last_token_of_the_template_is_scored_and_not_the_appended_end():
    documents = [([1, 2], [3, 4], [5, END]), ([1, 2], [6], [5, END]), ([END], [], [END])]
    assert scored_tokens(*documents, window=16)[0] == [(5, 1), (5, 2)]


def test_the_end_of_document_token_is_scored_if_it_ends_the_turn():
    documents = [([1, 2], [3, END], []), ([1, 2], [6, 7, END], []), ([END], [], [END])]
    assert scored_tokens(*documents, window=16)[0] == [(END, 1), (END, 2)]


def test_the_last_token_of_a_shard_is_scored():
    # The window has no input for it, because it is only the target of the token before.
    documents = [([1, 2], [3, END], []), ([1, 2], [6, 7, END], [])]
    places, found = scored_tokens(*documents, window=9)
    assert places == [(END, 1), (END, 2)]
    assert found['positions'][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_documents_without_an_answer_have_no_score():
    documents = [([1, 2], [3], [END]), ([END], [], []), ([4], [5], [END]), ([END], [], [])]
    assert scored_tokens(*documents, window=12)[0] == [(3, 1), (5, 3)]
