"""Quality heuristics of Gopher: Rae et al., Scaling Language Models (2021), arXiv:2112.11446, appendix A.1.1.

They assume languages that separate words by whitespace. A word is a sequence of characters without whitespace,
including its punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult, drop_if
from maxlm.data.filters.line_stats import filled_lines, fraction

# All bounds are from the paper.
MIN_WORDS = 50
MAX_WORDS = 100_000
MIN_MEAN_WORD_LENGTH = 3
MAX_MEAN_WORD_LENGTH = 10
MAX_SYMBOLS_PER_WORD = 0.1
MAX_BULLET_LINES = 0.9
MAX_ELLIPSIS_LINES = 0.3
MIN_ALPHABETIC_WORDS = 0.8
STOP_WORDS = ('the', 'be', 'to', 'of', 'and', 'that', 'have', 'with')
MIN_STOP_WORDS = 2

# The paper does not list them. These are the characters used in prose and Markdown.
BULLETS = ('•', '‣', '◦', '▪', '●', '-', '*')
ELLIPSES = ('...', '…')

_STOP_WORD = re.compile(rf'\b(?:{"|".join(STOP_WORDS)})\b', re.IGNORECASE)
_LETTER = re.compile(r'[^\W\d_]')


def gopher_quality(document: Document) -> Document | FilterResult:
    """Removes documents that are too short or too long for prose, or that consist of few real words."""
    text = document.text
    words = text.split()
    num_words = len(words)
    mean_length = fraction(sum(map(len, words)), num_words)
    rule = 'gopher_quality: '
    removal = (
        drop_if(num_words < MIN_WORDS, rule + 'too few words', num_words, MIN_WORDS)
        or drop_if(num_words > MAX_WORDS, rule + 'too many words', num_words, MAX_WORDS)
        or drop_if(mean_length < MIN_MEAN_WORD_LENGTH, rule + 'words too short', mean_length, MIN_MEAN_WORD_LENGTH)
        or drop_if(mean_length > MAX_MEAN_WORD_LENGTH, rule + 'words too long', mean_length, MAX_MEAN_WORD_LENGTH)
    )
    if removal:
        return removal
    hashes = text.count('#') / num_words
    ellipses = sum(map(text.count, ELLIPSES)) / num_words
    lines = filled_lines(text)
    bullet_lines = sum(line.startswith(BULLETS) for line in lines) / len(lines)
    ellipsis_lines = sum(line.endswith(ELLIPSES) for line in lines) / len(lines)
    return (
        drop_if(hashes > MAX_SYMBOLS_PER_WORD, rule + 'hash signs', hashes, MAX_SYMBOLS_PER_WORD)
        or drop_if(ellipses > MAX_SYMBOLS_PER_WORD, rule + 'ellipses', ellipses, MAX_SYMBOLS_PER_WORD)
        or drop_if(bullet_lines > MAX_BULLET_LINES, rule + 'lines with a bullet', bullet_lines, MAX_BULLET_LINES)
        or drop_if(
            ellipsis_lines > MAX_ELLIPSIS_LINES, rule + 'lines with an ellipsis', ellipsis_lines, MAX_ELLIPSIS_LINES
        )
        or _check_words(rule, text, words)
        or document
    )


def _check_words(rule: str, text: str, words: Sequence[str]) -> FilterResult | None:
    # Most words begin with a letter, so the search is only needed for the rest.
    alphabetic = sum(1 for word in words if word[0].isalpha() or _LETTER.search(word)) / len(words)
    stop_words = _distinct_stop_words(text)
    return drop_if(
        alphabetic < MIN_ALPHABETIC_WORDS, rule + 'words without a letter', alphabetic, MIN_ALPHABETIC_WORDS
    ) or drop_if(stop_words < MIN_STOP_WORDS, rule + 'stop words', stop_words, MIN_STOP_WORDS)


def _distinct_stop_words(text: str) -> int:
    """Returns the number of distinct stop words in the text, at most MIN_STOP_WORDS."""
    found: set[str] = set()
    for match in _STOP_WORD.finditer(text):
        found.add(match.group().lower())
        if len(found) == MIN_STOP_WORDS:
            break
    return len(found)
