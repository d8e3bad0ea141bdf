import pytest

from maxlm.data.filters.c4_fineweb import c4, fineweb

SENTENCE = 'This line is a sentence.'
PAGE = '\n'.join([SENTENCE] * 3)


def test_c4_keeps_a_page_of_sentences_unchanged(apply_filter):
    assert apply_filter(c4, PAGE) is None


@pytest.mark.parametrize(
    'line',
    [
        'One two three four.',
        'One two three four five',
        'One two three four five:',
        'One two three four five...',
        'One two three four five…',
        'Please enable JavaScript to see this page.',
        'Read our Terms of Use before you go on.',
        'Here is our Privacy Policy for all the visitors.',
        'Here is our cookie policy for all the visitors.',
        'This site uses cookies to be of more use.',
        'We tell you of our use of cookies here.',
        'All of us use cookies on these many pages.',
        f'One two three four {"x" * 1001}.',
        '',
    ],
)
def test_c4_drops_a_line(apply_filter, line):
    assert apply_filter(c4, f'{SENTENCE}\n{line}\n{SENTENCE}\n{SENTENCE}') == PAGE


@pytest.mark.parametrize(
    'line',
    [
        'One two three four five.',
        'One two three four five?',
        'One two three four five!',
        'He said: "One two three four five"',
        'He said: “One two three four five.”',
        f'One two three four {"x" * 999}.',
    ],
)
def test_c4_keeps_a_line(apply_filter, line):
    assert apply_filter(c4, f'{PAGE}\n{line}') is None


def test_c4_drops_citations_and_surrounding_spaces(apply_filter):
    assert (
        apply_filter(c4, f'  This line is[12] a[edit] sentence.[citation needed][] \n{PAGE}') == f'{SENTENCE}\n{PAGE}'
    )
    assert apply_filter(c4, f'Here it is [see 12] kept so.\n{PAGE}') is None


@pytest.mark.parametrize(
    ('reason', 'text'),
    [
        ('too few sentences', f'{SENTENCE}\n{SENTENCE}'),
        ('too few sentences', ''),
        # A dropped line does not count.
        ('too few sentences', f'{SENTENCE}\n{SENTENCE}\nNo. No. No. No.'),
        ('lorem ipsum', f'{PAGE}\nLorem ipsum dolor'),
        ('curly bracket', f'{PAGE}\nif (x) {{'),
    ],
)
def test_c4_removes_a_page(apply_filter, reason, text):
    assert apply_filter(c4, text) == f'c4: {reason}'


def test_c4_counts_sentences_not_lines(apply_filter):
    assert apply_filter(c4, 'One is here. Two is there! Is it "three?"') is None
    assert apply_filter(c4, 'One is 3.5 and two is a.b.c now. That is it.') == 'c4: too few sentences'


def page(num_lines, *, num_ended, num_short=0):
    """Returns distinct lines: `num_ended` end like sentences, `num_short` have 29 characters and the rest 30."""
    lines = []
    for number in range(num_lines):
        end = '.' if number < num_ended else 'x'
        lines.append(f'{number:03}'.ljust(28 if number < num_short else 29, 'x') + end)
    return '\n'.join(lines)


def repeated(num_lines, num_repeated):
    lines = page(num_lines - num_repeated, num_ended=num_lines).split('\n')
    return '\n'.join([*lines, *lines[:1] * num_repeated])


@pytest.mark.parametrize(
    ('reason', 'kept', 'removed'),
    [
        ('ended lines', page(100, num_ended=13), page(100, num_ended=12)),
        ('short lines', page(100, num_ended=100, num_short=66), page(100, num_ended=100, num_short=67)),
        ('characters in repeated lines', repeated(100, 9), repeated(100, 10)),
    ],
)
def test_each_fineweb_rule_at_its_bound(apply_filter, reason, kept, removed):
    assert apply_filter(fineweb, kept) is None
    assert apply_filter(fineweb, removed) == f'fineweb: {reason}'


@pytest.mark.parametrize('end', ['.', '!', '?', '"', "'", '”', '’'])
def test_fineweb_line_endings(apply_filter, end):
    assert apply_filter(fineweb, page(10, num_ended=2).replace('.', end)) is None
    assert apply_filter(fineweb, page(10, num_ended=2).replace('.', ':')) == 'fineweb: ended lines'


def test_fineweb_does_not_count_empty_lines(apply_filter):
    assert apply_filter(fineweb, page(10, num_ended=2).replace('\n', '\n\n\n \n')) is None
    assert apply_filter(fineweb, ' \n') == 'fineweb: ended lines'
