"""Heuristics for web pages from C4 and FineWeb.

They assume languages that separate words by whitespace and end sentences with Latin punctuation.
"""

from __future__ import annotations

import dataclasses
import re

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult, drop_if
from maxlm.data.filters.line_stats import filled_lines, fraction, repeated_fractions

# Raffel et al., Exploring the Limits of Transfer Learning (2020), arXiv:1910.10683, section 2.2. The numbers, the
# phrases and the maximum word length are from the program that made C4 (c4_utils.py of TensorFlow Datasets).
C4_MIN_WORDS_PER_LINE = 5
C4_MIN_SENTENCES = 3
C4_MAX_WORD_LENGTH = 1000
C4_LINE_ENDS = ('.', '!', '?', '"', '”')
C4_CUT_SHORT = ('...', '…')
C4_POLICIES = (
    'terms of use',
    'privacy policy',
    'cookie policy',
    'uses cookies',
    'use of cookies',
    'use cookies',
)

# Penedo et al., The FineWeb Datasets (2024), arXiv:2406.17557, section 3.6. (The default of the same rule in datatrove
# is 0.01 for the repeated characters.)
FINEWEB_MIN_ENDED_LINES = 0.12
FINEWEB_MAX_REPEATED_CHARACTERS = 0.1
FINEWEB_SHORT_LINE = 30
FINEWEB_MAX_SHORT_LINES = 0.67
FINEWEB_LINE_ENDS = ('.', '!', '?', '"', "'", '”', '’')

_CITATION = re.compile(r'\[(?:\d*|edit|citation needed)\]')
_SENTENCE_END = re.compile(r'[.!?]+["\'”’)\]]*(?=\s|$)')
_LONG_WORD = re.compile(rf'\S{{{C4_MAX_WORD_LENGTH + 1}}}')


def c4(document: Document) -> Document | FilterResult:
    """Keeps the lines that are sentences. Removes pages with too few sentences and pages that are not prose.

    Two rules of the paper are not applied: the word list, which is not part of this package, and the removal of
    repeated spans of three sentences, which requires the entire corpus.
    """
    text = document.text
    lowered = text.lower()
    for rule, mark in (('lorem ipsum', 'lorem ipsum'), ('curly bracket', '{')):
        if mark in lowered:
            return FilterResult(f'c4: {rule}', _around(text, lowered.index(mark), len(mark)))
    lines = [line for line in (_CITATION.sub('', line).strip() for line in filled_lines(text)) if _is_prose(line)]
    # A line that ends only with a quotation mark counts as one sentence.
    sentences = sum(max(1, len(_SENTENCE_END.findall(line))) for line in lines)
    removal = drop_if(sentences < C4_MIN_SENTENCES, 'c4: too few sentences', sentences, C4_MIN_SENTENCES)
    if removal:
        return removal
    kept = '\n'.join(lines)
    return document if kept == text else dataclasses.replace(document, text=kept)


def fineweb(document: Document) -> Document | FilterResult:
    """Removes lists, menus and tables: few lines end like sentences, or many lines are short or repeated."""
    lines = filled_lines(document.text)
    ended = fraction(sum(line.endswith(FINEWEB_LINE_ENDS) for line in lines), len(lines))
    short = fraction(sum(len(line) < FINEWEB_SHORT_LINE for line in lines), len(lines))
    _, repeated = repeated_fractions(lines)
    # The paper also removes documents exactly at the bound.
    return (
        drop_if(ended <= FINEWEB_MIN_ENDED_LINES, 'fineweb: ended lines', ended, FINEWEB_MIN_ENDED_LINES)
        or drop_if(
            repeated >= FINEWEB_MAX_REPEATED_CHARACTERS,
            'fineweb: characters in repeated lines',
            repeated,
            FINEWEB_MAX_REPEATED_CHARACTERS,
        )
        or drop_if(short >= FINEWEB_MAX_SHORT_LINES, 'fineweb: short lines', short, FINEWEB_MAX_SHORT_LINES)
        or document
    )


def _is_prose(line: str) -> bool:
    if not line.endswith(C4_LINE_ENDS) or line.endswith(C4_CUT_SHORT):
        return False
    if len(line.split(maxsplit=C4_MIN_WORDS_PER_LINE - 1)) < C4_MIN_WORDS_PER_LINE or _LONG_WORD.search(line):
        return False
    lowered = line.lower()
    return 'javascript' not in lowered and not any(policy in lowered for policy in C4_POLICIES)


def _around(text: str, start: int, length: int) -> str:
    return ' '.join(text[max(0, start - 20) : start + length + 20].split())
