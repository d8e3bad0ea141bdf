"""Tests that any JSON text gives a value or a ValueError."""

import datetime
import json

import pytest

from maxlm.storage.json_text import MAX_DEPTH, parse_json, parse_lines, strings_in, to_json

BRACKETS = [('[', ']'), ('{"a":', '}'), ('[{"a":', '}]')]


@pytest.mark.parametrize('text', ['{"a": [1, 2.5, null, "é"]}', '[' * MAX_DEPTH + ']' * MAX_DEPTH])
def test_value(text):
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize('brackets', BRACKETS)
@pytest.mark.parametrize('depth', [MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize('is_closed', [True, False])
def test_deep(brackets, depth, is_closed):
    opening, closing = brackets
    text = opening * depth + '1' + (closing * depth if is_closed else '')
    for form in (text, text.encode()):
        with pytest.raises(ValueError):
            parse_json(form)


def test_wide_is_not_deep():
    wide = json.dumps([{'a': [{}]}] * 1000)
    assert parse_json(wide) == json.loads(wide)


@pytest.mark.parametrize('text', [b'\xff', b'"\xed\xa0\x80"', '', 'nul', b'\x00', '1' * 5000])
def test_not_json(text):
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    ('value', 'reason'),
    [
        (float('nan'), 'no NaN'),
        ({'a': [-float('inf')]}, 'no NaN'),
        (parse_json('1e400'), 'number beyond'),
        ('\ud800', 'surrogate'),
        ({'\udfff': 1}, 'surrogate'),
        (datetime.date(2024, 1, 1), 'not JSON serializable'),
    ],
)
def test_values_that_are_not_json_are_not_written(value, reason):
    with pytest.raises(ValueError, match=reason):
        to_json(value)
    value = {'é': [1, 2.5, None, '"']}
    assert to_json(value) == '{"é": [1, 2.5, null, "\\""]}'


def test_lines_end_at_newlines_only():
    content = '{"a": "x\u2028y"}\n\n 3 \r\n[1]'.encode()
    assert list(parse_lines(content)) == [(1, {'a': 'x\u2028y'}), (3, 3), (4, [1])]
    with pytest.raises(ValueError, match='line 3 is not valid JSON'):
        list(parse_lines(b'1\n\n{'))


def test_strings_of_a_value():
    assert list(strings_in({'a': ['b', {'c': 'd'}, 3, None], 'e': 'f'})) == ['b', 'd', 'f']
