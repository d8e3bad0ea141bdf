import random

import pytest

from maxlm.data.filters.gopher_repetition import gopher_repetition, ngram_fractions


def distinct_words(num, length=4):
    """Returns distinct words of `length` letters in arbitrary order."""
    letters = 'abcdefghijklmnopqrstuvwxyz'
    numbers = random.Random(0).sample(range(26**3), num)
    return [(letters[n // 676] + letters[n // 26 % 26] + letters[n % 26]).ljust(length, 'x') for n in numbers]


def with_repetitions(parts, times, separator='\n'):
    """Returns the joined parts, followed by `times` repetitions of the first part."""
    return separator.join([*parts, *parts[:1] * times])


def with_phrase(n, times, num_words):
    """Returns `num_words` words of equal length, in which a phrase of n words occurs `times` times."""
    rest = distinct_words(num_words - n * times)
    phrase = ' '.join(word.upper() for word in distinct_words(n))
    step = len(rest) // times
    parts = [' '.join([phrase, *rest[i * step : (i + 1) * step]]) for i in range(times)]
    return ' '.join([*parts, *rest[times * step :]])


# Repeating the first line adds hardly any characters.
LINES = ['a', *distinct_words(6, length=40)]
# Other paragraphs have two lines, so that few lines are duplicates.
PARAGRAPHS = ['a', *map('\n'.join, zip(distinct_words(6, length=40), distinct_words(6, length=30), strict=True))]
# The spaces of an indentation belong to the paragraph, but not to its lines and words.
INDENTED = 'b\n' + 30 * ' ' + 'c'


@pytest.mark.parametrize(
    ('reason', 'kept', 'removed'),
    [
        # Shares of 3/10 and 4/11.
        ('repeated lines', with_repetitions(LINES, 3), with_repetitions(LINES, 4)),
        # Shares of 1/5 and 1/4 with equal lengths.
        (
            'characters in repeated lines',
            with_repetitions(distinct_words(4), 1),
            with_repetitions(distinct_words(3), 1),
        ),
        ('repeated paragraphs', with_repetitions(PARAGRAPHS, 3, '\n\n'), with_repetitions(PARAGRAPHS, 4, '\n \n')),
        # 33 of 2 · 33 + 99 characters, and 33 of 2 · 33 + 98.
        (
            'characters in repeated paragraphs',
            with_repetitions([INDENTED, *distinct_words(3, length=33)], 1, '\n\n'),
            with_repetitions([INDENTED, *distinct_words(2, length=33), 32 * 'x'], 1, '\n\n'),
        ),
        # All occurrences count; all words have equal length.
        ('most frequent 2-gram', with_phrase(2, 10, 100), with_phrase(2, 10, 99)),
        ('most frequent 3-gram', with_phrase(3, 6, 100), with_phrase(3, 6, 99)),
        ('most frequent 4-gram', with_phrase(4, 4, 100), with_phrase(4, 4, 99)),
        # The first occurrence is no duplicate.
        ('repeated 5-grams', with_phrase(5, 7, 200), with_phrase(5, 7, 199)),
        ('repeated 6-grams', with_phrase(6, 8, 300), with_phrase(6, 8, 299)),
        ('repeated 7-grams', with_phrase(7, 2, 54), with_phrase(7, 2, 53)),
        ('repeated 8-grams', with_phrase(8, 2, 67), with_phrase(8, 2, 66)),
        ('repeated 9-grams', with_phrase(9, 2, 82), with_phrase(9, 2, 81)),
        ('repeated 10-grams', with_phrase(10, 2, 100), with_phrase(10, 2, 99)),
    ],
)
def test_each_rule_at_its_bound(apply_filter, reason, kept, removed):
    assert apply_filter(gopher_repetition, kept) is None
    assert apply_filter(gopher_repetition, removed) == f'gopher_repetition: {reason}'


@pytest.mark.parametrize(
    ('text', 'shares'),
    [
        ('', []),
        ('a', []),
        ('a b c d', []),
        ('a b a', []),
        # `b a` overlaps both occurrences of `a b` but is rarer.
        ('a b a b cc', [(2, 4 / 6)]),
        # Overlapping occurrences count once.
        ('a a a a', [(2, 1.0), (3, 1.0)]),
        # The longest of equally frequent n-grams counts.
        ('a b c dd ee c a b f dd ee g', [(2, 8 / 16)]),
        ('a b c d e . a b c d e', [(2, 4 / 11), (3, 6 / 11), (4, 8 / 11), (5, 5 / 11)]),
    ],
)
def test_shares_of_known_texts(text, shares):
    assert dict(ngram_fractions(text.split())) == pytest.approx(dict(shares))


def reference_shares(words):
    """Computes the shares by definition, word by word."""
    shares = []
    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        if len(set(grams)) == len(grams):
            break
        if n <= 4:
            top = max(grams, key=lambda gram: (grams.count(gram), sum(map(len, gram)), -grams.index(gram)))
            starts = [i for i, gram in enumerate(grams) if gram == top]
        else:
            starts = [i for i, gram in enumerate(grams) if gram in grams[:i]]
        covered = {place for start in starts for place in range(start, start + n)}
        shares.append((n, sum(len(words[place]) for place in covered) / sum(map(len, words))))
    return shares


def test_shares_match_the_definition():
    lengths = set()
    for seed in range(30):
        rng = random.Random(seed)
        words = rng.choices(['a', 'bb', 'ccc', 'dddd'][: 2 + seed % 3], k=rng.randrange(5, 60))
        shares = dict(ngram_fractions(words))
        assert shares == pytest.approx(dict(reference_shares(words)))
        lengths.add(len(shares))
    assert len(lengths) > 3, 'the texts must have various repetitions'


def test_a_short_text_without_repetition_is_kept(apply_filter):
    # Each 4-gram has more than 16 % of the characters, but none occurs twice.
    assert apply_filter(gopher_repetition, 'only these five words here') is None
    assert apply_filter(gopher_repetition, ' ') is None
