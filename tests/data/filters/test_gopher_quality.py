import pytest

from maxlm.data.filters.gopher_quality import gopher_quality


def prose(*words, num_words=100, filler='house'):
    """Returns stop words and `words`, padded with the filler to `num_words`."""
    words = ('the', 'and', *words)
    return ' '.join([*words, *[filler] * (num_words - len(words))])


def lines(num_lines, num_marked, start='', end=''):
    """Returns lines of ten words; `num_marked` of them have the given start and end."""
    line = 'the house and the garden behind it were quite small'
    return '\n'.join([f'{start}{line}{end}'] * num_marked + [line] * (num_lines - num_marked))


@pytest.mark.parametrize(
    ('reason', 'kept', 'removed'),
    [
        ('too few words', prose(num_words=50), prose(num_words=49)),
        ('too many words', prose(num_words=100_000), prose(num_words=100_001)),
        ('words too short', prose(filler='cat'), prose('at', filler='cat')),
        ('words too long', prose('a' * 17, 'b' * 17, filler='c' * 10), prose('a' * 17, 'b' * 18, filler='c' * 10)),
        ('hash signs', prose(*['wood#'] * 10), prose(*['wood#'] * 11)),
        ('ellipses', prose(*['wood...'] * 5, *['wood…'] * 5), prose(*['wood...'] * 5, *['wood…'] * 6)),
        ('lines with a bullet', lines(10, 9, start='• '), lines(10, 10, start='• ')),
        ('lines with a bullet', lines(20, 18, start='  - '), lines(20, 19, start='  - ')),
        ('lines with an ellipsis', lines(10, 3, end='...'), lines(10, 4, end=' … ')),
        ('words without a letter', prose(*['1234'] * 20), prose(*['1234'] * 21)),
        ('stop words', prose('Have'), prose('house').replace('and', 'cat')),
    ],
)
def test_each_rule_at_its_bound(apply_filter, reason, kept, removed):
    assert apply_filter(gopher_quality, kept) is None
    assert apply_filter(gopher_quality, removed) == f'gopher_quality: {reason}'


def test_words_without_a_letter(apply_filter):
    # Letters of any script count at any position of a word.
    assert apply_filter(gopher_quality, prose(*['(«дом»)', '1a', '_é_'] * 10)) is None
    assert apply_filter(gopher_quality, prose(*['1_2', '---', '٣٤٥'] * 10)) == 'gopher_quality: words without a letter'


def test_a_stop_word_counts_once_and_only_as_a_word(apply_filter):
    text = prose().replace('and', 'the')
    assert apply_filter(gopher_quality, text) == 'gopher_quality: stop words'
    assert apply_filter(gopher_quality, text.replace('house', 'other', 1)) == 'gopher_quality: stop words'
    assert apply_filter(gopher_quality, text.replace('house', 'of,', 1)) is None


def test_empty_lines_are_not_counted(apply_filter):
    assert apply_filter(gopher_quality, lines(10, 10, start='• ').replace('\n', '\n\n\n')) == (
        'gopher_quality: lines with a bullet'
    )


def test_a_text_without_words(apply_filter):
    assert apply_filter(gopher_quality, ' \n') == 'gopher_quality: too few words'
