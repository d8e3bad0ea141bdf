"""Gopher's repetition heuristics: Rae et al., Scaling Language Models (2021), arXiv:2112.11446, table A1.

They are made for languages with blanks between the words; a word is what stands between blanks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult, drop_if
from maxlm.data.filters.line_stats import filled_lines, repeated_fractions

# Largest shares that are kept, all of them from table A1.
MAX_REPEATED_LINES = 0.30
MAX_REPEATED_LINE_CHARACTERS = 0.20
MAX_REPEATED_PARAGRAPHS = 0.30
MAX_REPEATED_PARAGRAPH_CHARACTERS = 0.20
MAX_TOP_NGRAM_CHARACTERS = {2: 0.20, 3: 0.18, 4: 0.16}
MAX_REPEATED_NGRAM_CHARACTERS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

_PARAGRAPH_END = re.compile(r'\n\s*\n')


def gopher_repetition(document: Document) -> Document | FilterResult:
    """Removes what says the same line, paragraph or phrase again and again."""
    text = document.text
    lines, line_characters = repeated_fractions(filled_lines(text))
    paragraphs, paragraph_characters = repeated_fractions(_PARAGRAPH_END.split(text.strip()))
    rule = 'gopher_repetition: '
    for name, value, bound in (
        ('repeated lines', lines, MAX_REPEATED_LINES),
        ('characters in repeated lines', line_characters, MAX_REPEATED_LINE_CHARACTERS),
        ('repeated paragraphs', paragraphs, MAX_REPEATED_PARAGRAPHS),
        ('characters in repeated paragraphs', paragraph_characters, MAX_REPEATED_PARAGRAPH_CHARACTERS),
    ):
        if removal := drop_if(value > bound, rule + name, value, bound):
            return removal
    for n, value in ngram_shares(text.split()):
        if n in MAX_TOP_NGRAM_CHARACTERS:
            name, bound = f'most frequent {n}-gram', MAX_TOP_NGRAM_CHARACTERS[n]
        else:
            name, bound = f'repeated {n}-grams', MAX_REPEATED_NGRAM_CHARACTERS[n]
        if removal := drop_if(value > bound, rule + name, value, bound):
            return removal
    return document


def ngram_shares(words: Sequence[str]) -> Iterator[tuple[int, float]]:
    """n and a share of the characters of all words, for n = 2 … 10 while an n-gram occurs twice.

    For n in MAX_TOP_NGRAM_CHARACTERS it is the share of all occurrences of the most frequent n-gram (of several, the
    longest), for the others that of all n-grams that were there before. What lies in two occurrences is counted once.
    """
    table: dict[str, int] = {}
    ids = np.fromiter((table.setdefault(word, len(table)) for word in words), np.int64, len(words))
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    # Where the n-grams begin that occur again, and which of them are equal.
    starts = np.flatnonzero(np.bincount(ids)[ids] > 1) if len(ids) else ids
    grams = ids[starts]
    for n in range(2, 1 + max(MAX_REPEATED_NGRAM_CHARACTERS)):
        # An n-gram that occurs again begins with an (n - 1)-gram that does: the others are not looked at any more.
        inside = starts + n <= len(words)
        starts, grams = starts[inside], grams[inside]
        keys = grams * len(table) + ids[starts + n - 1]
        _, first, grams, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        again = counts[grams] > 1
        if not again.any():
            return
        if n in MAX_TOP_NGRAM_CHARACTERS:
            most_frequent = np.flatnonzero(counts == counts.max())
            sizes = [lengths[start : start + n].sum() for start in starts[first[most_frequent]]]
            counted = grams == most_frequent[np.argmax(sizes)]
        else:
            counted = again.copy()
            counted[first] = False
        yield n, _covered_share(starts[counted], n, lengths)
        starts, grams = starts[again], grams[again]


def _covered_share(starts: np.ndarray, n: int, lengths: np.ndarray) -> float:
    """Share of the characters in the n words from each of `starts`; `lengths` [words] are those of all words."""
    changes = np.zeros(len(lengths) + 1, np.int64)
    changes[starts] += 1
    # In one stroke only distinct places can be changed, as those of each kind are.
    changes[starts + n] -= 1
    covered = np.cumsum(changes[:-1]) > 0
    return float(lengths[covered].sum()) / float(lengths.sum())
