"""Tests the layout of fields: fields are never split, and control characters are removed."""

import itertools
import re

import pytest
from rich.text import Text

from maxlm.monitoring.layout import bar, columns, field, fit, flow, plain, truncate

NUMBERS = ['12,345', '0.0001', '$1,234.56', '12 min 05 s', '3.1e-04']


@pytest.mark.parametrize('width', range(12, 90, 3))
def test_fields_are_not_split(width):
    fields = [field(f'name{number}', value) for number, value in enumerate(NUMBERS)]
    lines = flow(fields, width)
    assert all(line.cell_len <= width for line in lines)
    shown = ' · '.join(line.plain for line in lines)
    if width >= max(item.cell_len for item in fields):
        assert shown == ' · '.join(item.plain for item in fields)
    # The first field of the next line does not fit in the line.
    for line, after in itertools.pairwise(lines):
        assert line.cell_len + 3 + len(after.plain.split(' · ')[0]) > width


@pytest.mark.parametrize('width', range(1, 60))
def test_message_is_truncated_between_words(width):
    text = 'step 1234567 skipped: loss 12.5 is far above recent values'
    line = truncate(text, width)
    assert line.cell_len <= width
    words = line.plain.removesuffix('…').split()
    if width >= 10:
        assert words == text.split()[: len(words)]
    assert (line.plain == text) == (width >= len(text))


def test_number_is_never_truncated():
    text = 'a 1234567890 b'
    found = {number for width in range(5, 20) for number in re.findall(r'\d+', truncate(text, width).plain)}
    assert found == {'1234567890'}


def test_wide_characters_count_twice():
    assert truncate('損失 損失 損失', 8).cell_len <= 8
    assert fit(Text('損失損失'), 5).cell_len == 5


def test_control_characters_are_removed():
    assert plain('a\x1b[31mb\nc') == 'a [31mb c'
    for bad in '\x1b\n\r\t\x07\x00\u202e\x9b':
        assert bad not in plain(f'a{bad}b')


def test_columns_are_aligned_and_omitted_completely():
    rows = [[Text(word) for word in row] for row in (('a', '1', '200', ''), ('long', '22', '3', ''))]
    assert [line.plain for line in columns(rows, 40)] == ['a      1  200', 'long  22    3']
    assert [line.plain for line in columns(rows, 12)] == ['a      1', 'long  22']
    assert columns([], 10) == []


@pytest.mark.parametrize('share', [-1, 0, 0.5, 0.999, 1, 7])
def test_bars_have_the_requested_width(share):
    assert bar(share, 10, 'green').cell_len == 10
    assert bar(0.5, 10, 'green').plain == '━━━━━─────'
