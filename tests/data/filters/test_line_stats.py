import pytest

from maxlm.data.filters.line_stats import filled_lines, fraction, repeated_fractions


def test_lines_with_text():
    assert filled_lines('a\n \n\tb c \r\n\n') == ['a', 'b c']
    assert filled_lines('') == []


@pytest.mark.parametrize(
    ('parts', 'shares'),
    [
        ([], (0, 0)),
        (['a'], (0, 0)),
        (['a', 'b'], (0, 0)),
        (['a', 'bbb', 'a'], (1 / 3, 1 / 5)),
        (['bbb', 'a', 'bbb', 'bbb'], (2 / 4, 6 / 10)),
    ],
)
def test_repeated_shares(parts, shares):
    assert repeated_fractions(parts) == pytest.approx(shares)


def test_fraction_of_zero():
    assert fraction(0, 0) == 0
    assert fraction(1, 4) == 0.25
