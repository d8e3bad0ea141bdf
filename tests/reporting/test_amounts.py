"""Numbers as people read them."""

import math

import pytest

from maxlm.reporting import amounts


@pytest.mark.parametrize(
    ('write', 'value', 'text'),
    [
        (amounts.whole, 12345.4, '12,345'),
        (amounts.figure, 0.0, '0'),
        (amounts.figure, 0.002, '0.002'),
        (amounts.figure, 3.14159, '3.142'),
        (amounts.figure, -12345.6, '-12,346'),
        (amounts.figure, 100.0, '100'),
        (amounts.figure, 1.23e-7, '1.23e-07'),
        (amounts.loss, 2.34567, '2.3457'),
        (amounts.short, 999.4, '999'),
        (amounts.short, 999_999, '1M'),
        (amounts.short, 1_350_000_000, '1.35B'),
        (amounts.percent, 0.1234, '12.3%'),
        (amounts.size, 900, '900 B'),
        (amounts.size, 44 * 2**30, '44.0 GiB'),
        (amounts.size, 3 * 2**40, '3.0 TiB'),
        (amounts.dollars, 1234.567, '$1,234.57'),
        (amounts.dollars, 0.01234, '$0.0123'),
        (amounts.dollars, 0.0, '$0.00'),
        (amounts.duration, 0.45, '0.45 s'),
        (amounts.duration, 59.9, '59.9 s'),
        (amounts.duration, 59.97, '1 min 00 s'),
        (amounts.duration, 245, '4 min 05 s'),
        (amounts.duration, 3599.9, '1 h 00 min'),
        (amounts.duration, 7380, '2 h 03 min'),
        (amounts.duration, 86399, '1 d 00 h'),
        (amounts.duration, 3 * 86400 + 4 * 3600, '3 d 04 h'),
        (amounts.moment, 1_760_000_000, '2025-10-09 08:53:20 UTC'),
        (amounts.moment, 1e18, amounts.DASH),
    ],
)
def test_texts(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    'name', ['whole', 'figure', 'loss', 'short', 'percent', 'size', 'dollars', 'duration', 'moment']
)
def test_what_is_not_known_is_a_dash(name):
    write = getattr(amounts, name)
    assert {write(None), write(math.nan), write(math.inf)} == {amounts.DASH}
