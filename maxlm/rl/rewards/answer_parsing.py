"""Extracts answers from responses: marked answers, numbers and letters."""

from __future__ import annotations

import re
from fractions import Fraction

MARK = '####'
BOXED = '\\boxed{'
# `The answer is 42.`, `Final answer: 42`; up to the end of the line.
ANSWER_PHRASE = re.compile(r'\banswer\s*(?:is\b|:|=)[\s:]*(.+)', re.IGNORECASE)
# Characters around words in Markdown.
MARKUP = ' \t\n*_`"\''
# The number of digits and the exponent are limited, because larger numbers cannot be answers and are slow to parse.
NUMBER = r'[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,300})?(?:\.\d{1,300})?(?:[eE][-+]?\d{1,3})?'
FIRST_NUMBER = re.compile(r'(?<![\w.])[-+]?(?:\d|\.\d)')
FRACTION = re.compile(rf'({NUMBER})\s*/\s*({NUMBER})')
LATEX_FRACTION = re.compile(r'([-+]?)\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}')
LATEX_NOISE = re.compile(r'\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}|\\[!,;: ]|\\left|\\right|\$|\\%|%')
NUMBER_ALONE = re.compile(NUMBER)
FIRST_LETTER = re.compile(r'\W*(?:([A-Z])(?:\W|$)|([a-z])\W*$)')
LAST_LETTER = re.compile(r'(?:^|[\s(*"\'])([A-Z])[).*"\'\s]*$')
# A and I are also words.
LETTER_BETWEEN = re.compile(r'\(([A-Z])\)|\b([B-HJ-Z])\b')


def boxed(response: str) -> str | None:
    """Returns the content of the last \\boxed{…}, with nested braces."""
    start = response.rfind(BOXED)
    if start < 0:
        return None
    depth = 1
    for index in range(start + len(BOXED), len(response)):
        depth += {'{': 1, '}': -1}.get(response[index], 0)
        if depth == 0:
            return response[start + len(BOXED) : index]
    return None


def marked_answer(response: str) -> str | None:
    """Returns the marked answer of a response: boxed, after the last `####`, or after `answer is`; None without one."""
    if (content := boxed(response)) is not None:
        return content.strip()
    if MARK in response:
        return response.rpartition(MARK)[2].strip().partition('\n')[0].strip()
    phrases = ANSWER_PHRASE.findall(response)
    return phrases[-1].strip() if phrases else None


def plain(text: str) -> str:
    """Normalizes a text: lower case, single spaces, no final period, no surrounding Markdown, no LaTeX markup."""
    text = LATEX_NOISE.sub(lambda match: match.group(1) or '', text).strip(MARKUP)
    return ' '.join(text.removesuffix('.').strip(MARKUP).split()).casefold()


def without_markup(text: str) -> str:
    """Removes dollar and percent signs and LaTeX markup, and writes LaTeX fractions with a slash."""
    text = LATEX_NOISE.sub(lambda match: match.group(1) or '', text.replace('−', '-'))
    return LATEX_FRACTION.sub(r' \1\2/\3 ', text)


def number_of(text: str) -> Fraction | None:
    """Returns the first number in a text, ignoring dollar and percent signs; None if there is none.

    Examples of numbers are 1,234.5, -3e2, 1/3 and \\frac{1}{3}.
    """
    text = without_markup(text)
    first = FIRST_NUMBER.search(text)
    return number_at(text, first.start()) if first else None


def last_number(text: str) -> Fraction | None:
    """Returns the last number in a text without a marked answer; None if there is none."""
    text = without_markup(text)
    starts = [match.start() for match in FIRST_NUMBER.finditer(text)]
    while starts:
        start = starts.pop()
        # The denominator of a fraction is not a separate number.
        if starts and text[starts[-1] : start].rstrip().endswith('/'):
            continue
        return number_at(text, start)
    return None


def number_at(text: str, start: int) -> Fraction | None:
    """Returns the number or fraction at index `start`; None if it is too long or divides by zero."""
    for pattern in (FRACTION, NUMBER_ALONE):
        match = pattern.match(text, start)
        if match is None or text[match.end() : match.end() + 1].isdigit():
            continue
        terms = [term.replace(',', '') for term in match.groups() or (match.group(),)]
        try:
            value = Fraction(terms[0])
            return value / Fraction(terms[1]) if len(terms) > 1 else value
        except ValueError:
            continue
        except ZeroDivisionError:
            return None
    return None


def choice_of(response: str) -> str | None:
    """Returns the chosen letter of a response in upper case; None if there is none.

    It is the letter of the marked answer, otherwise the letter at the end, otherwise the last separate letter.
    """
    marked, text = marked_answer(response), response.strip()
    match = FIRST_LETTER.match(LATEX_NOISE.sub(lambda found: found.group(1) or '', marked)) if marked else None
    if match is None and len(text.strip(' ().*')) == 1:
        match = FIRST_LETTER.match(text)
    match = match or LAST_LETTER.search(text)
    if match is None:
        match = next(reversed(list(LETTER_BETWEEN.finditer(text))), None)
    return next(letter for letter in match.groups() if letter).upper() if match else None
