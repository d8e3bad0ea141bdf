"""Repetition heuristics of Gopher: Rae et al., Scaling Language Models (2021), arXiv:2112.11446, table A1.

They assume languages that separate words by whitespace. A word is a sequence of characters without whitespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult, drop_if
from maxlm.data.filters.line_stats import filled_lines, repeated_fractions

# Upper bounds from table A1. A document above a bound is removed.
MAX_REPEATED_LINES = 0.30
MAX_REPEATED_LINE_CHARACTERS = 0.20
MAX_REPEATED_PARAGRAPHS = 0.30
MAX_REPEATED_PARAGRAPH_CHARACTERS = 0.20
MAX_TOP_NGRAM_CHARACTERS = {2: 0.20, 3: 0.18, 4: 0.16}
MAX_REPEATED_NGRAM_CHARACTERS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

_PARAGRAPH_END = re.compile(r'\n\s*\n')


def gopher_repetition(document: Document) -> Document | FilterResult:
    """Removes documents that repeat lines, paragraphs or phrases too often."""
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
    for n, value in ngram_fractions(text.split()):
        if n in MAX_TOP_NGRAM_CHARACTERS:
            name, bound = f'most frequent {n}-gram', MAX_TOP_NGRAM_CHARACTERS[n]
        else:
            name, bound = f'repeated {n}-grams', MAX_REPEATED_NGRAM_CHARACTERS[n]
        if removal := drop_if(value > bound, rule + name, value, bound):
            return removal
    return document


def ngram_fractions(words: Sequence[str]) -> Iterator[tuple[int, float]]:
    """Yields (n, fraction of the characters of all words) for n = 2 … 10. Stops at the first n without a repetition.

    For n in MAX_TOP_NGRAM_CHARACTERS, the fraction covers all occurrences of the most frequent n-gram. Among equally
    frequent n-grams, the longest counts. For larger n, the fraction covers all n-grams that occurred earlier in the
    text. Overlapping occurrences are counted once.
    """
    table: dict[str, int] = {}
    ids = np.fromiter((table.setdefault(word, len(table)) for word in words), np.int64, len(words))
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    # Start indices of repeated n-grams, and an id for each distinct n-gram.
    starts = np.flatnonzero(np.bincount(ids)[ids] > 1) if len(ids) else ids
    grams = ids[starts]
    for n in range(2, 1 + max(MAX_REPEATED_NGRAM_CHARACTERS)):
        # A repeated n-gram begins with a repeated (n - 1)-gram, so all other starts are dropped.
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
        yield n, _covered_fraction(starts[counted], n, lengths)
        starts, grams = starts[again], grams[again]


def _covered_fraction(starts: np.ndarray, n: int, lengths: np.ndarray) -> float:
    """Returns the fraction of characters in the n words from each of `starts`.

    Args:
        starts: indices of the first words.
        n: number of words.
        lengths: lengths of all words, [words].
    """
    changes = np.zeros(len(lengths) + 1, np.int64)
    changes[starts] += 1
    # Fancy indexing adds only once per distinct index; the starts are distinct.
    changes[starts + n] -= 1
    covered = np.cumsum(changes[:-1]) > 0
    return float(lengths[covered].sum()) / float(lengths.sum())
