"""Formatting of numbers."""

import math

import pytest

from maxlm.formatting import (
    DASH,
    format_bytes,
    format_dollars,
    format_duration,
    format_int,
    format_loss,
    format_number,
    format_percent,
    format_rate,
    format_si,
    format_time,
)


@pytest.mark.parametrize(
    ('write', 'value', 'text'),
    [
        (format_int, 12345.4, '12,345'),
        (format_number, 0.0, '0'),
        (format_number, 0.002, '0.002'),
        (format_number, 3.14159, '3.142'),
        (format_number, -12345.6, '-12,346'),
        (format_number, 100.0, '100'),
        (format_number, 1.23e-7, '1.23e-07'),
        (format_loss, 2.34567, '2.3457'),
        (format_si, 999.4, '999'),
        (format_si, 0.25, '0.25'),
        (format_si, 6.2e5, '620k'),
        (format_si, 999_999, '1M'),
        (format_si, 1_350_000_000, '1.35B'),
        (format_si, 1e12, '1T'),
        (format_percent, 0.1234, '12.3%'),
        (format_bytes, 900, '900 B'),
        (format_bytes, 999.96 * 2**20, '0.98 GiB'),
        (format_bytes, 1.25 * 2**30, '1.25 GiB'),
        (format_bytes, 9.996 * 2**30, '10.0 GiB'),
        (format_bytes, 44 * 2**30, '44.0 GiB'),
        (format_bytes, 3 * 2**40, '3.00 TiB'),
        (format_rate, 900, '900 B/s'),
        (format_rate, 5e6, '5.00 MB/s'),
        (format_rate, 999.96e6, '1.00 GB/s'),
        (format_rate, 3.35e12, '3,350.0 GB/s'),
        (format_dollars, 1234.567, '$1,234.57'),
        (format_dollars, 0.01234, '$0.0123'),
        (format_dollars, 0.0, '$0.00'),
        (format_duration, 0.45, '0.45 s'),
        (format_duration, 59.9, '59.9 s'),
        (format_duration, 59.97, '1 min 00 s'),
        (format_duration, 245, '4 min 05 s'),
        (format_duration, 3599.9, '1 h 00 min'),
        (format_duration, 7380, '2 h 03 min'),
        (format_duration, 86399, '1 d 00 h'),
        (format_duration, 3 * 86400 + 4 * 3600, '3 d 04 h'),
        (format_time, 1_760_000_000, '2025-10-09 08:53:20 UTC'),
        (format_time, 1e18, DASH),
    ],
)
def test_texts(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    'write',
    [
        format_int,
        format_number,
        format_loss,
        format_si,
        format_percent,
        format_bytes,
        format_rate,
        format_dollars,
        format_duration,
        format_time,
    ],
)
def test_unknown_values_are_a_dash(write):
    assert {write(None), write(math.nan), write(math.inf)} == {DASH}
