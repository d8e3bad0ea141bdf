"""Numbers as people read them."""

import math

import pytest

from maxlm.reporting.drawing import formatting


@pytest.mark.parametrize(
    ('write', 'value', 'text'),
    [
        (formatting.format_int, 12345.4, '12,345'),
        (formatting.format_number, 0.0, '0'),
        (formatting.format_number, 0.002, '0.002'),
        (formatting.format_number, 3.14159, '3.142'),
        (formatting.format_number, -12345.6, '-12,346'),
        (formatting.format_number, 100.0, '100'),
        (formatting.format_number, 1.23e-7, '1.23e-07'),
        (formatting.loss, 2.34567, '2.3457'),
        (formatting.format_si, 999.4, '999'),
        (formatting.format_si, 999_999, '1M'),
        (formatting.format_si, 1_350_000_000, '1.35B'),
        (formatting.percent, 0.1234, '12.3%'),
        (formatting.format_bytes, 900, '900 B'),
        (formatting.format_bytes, 44 * 2**30, '44.0 GiB'),
        (formatting.format_bytes, 3 * 2**40, '3.0 TiB'),
        (formatting.dollars, 1234.567, '$1,234.57'),
        (formatting.dollars, 0.01234, '$0.0123'),
        (formatting.dollars, 0.0, '$0.00'),
        (formatting.duration, 0.45, '0.45 s'),
        (formatting.duration, 59.9, '59.9 s'),
        (formatting.duration, 59.97, '1 min 00 s'),
        (formatting.duration, 245, '4 min 05 s'),
        (formatting.duration, 3599.9, '1 h 00 min'),
        (formatting.duration, 7380, '2 h 03 min'),
        (formatting.duration, 86399, '1 d 00 h'),
        (formatting.duration, 3 * 86400 + 4 * 3600, '3 d 04 h'),
        (formatting.format_time, 1_760_000_000, '2025-10-09 08:53:20 UTC'),
        (formatting.format_time, 1e18, formatting.DASH),
    ],
)
def test_texts(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    'name',
    [
        'format_int',
        'format_number',
        'loss',
        'format_si',
        'percent',
        'format_bytes',
        'dollars',
        'duration',
        'format_time',
    ],
)
def test_what_is_not_known_is_a_dash(name):
    write = getattr(formatting, name)
    assert {write(None), write(math.nan), write(math.inf)} == {formatting.DASH}
