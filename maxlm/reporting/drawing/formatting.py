"""Numbers as people read them. What is not known is a dash."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable

DASH = '–'
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def _or_dash(write: Callable[[float], str]) -> Callable[[float | None], str]:
    def written(value: float | None) -> str:
        return DASH if value is None or not math.isfinite(value) else write(value)

    written.__doc__ = write.__doc__
    return written


@_or_dash
def format_int(value: float) -> str:
    """12,345"""
    return f'{value:,.0f}'


@_or_dash
def format_number(value: float) -> str:
    """Four significant digits: 0.002, 3.142, 12,350, 1.2e-07."""
    if value and not 1e-4 <= abs(value) < 1e9:
        return f'{value:.4g}'
    digits = 0 if not value else max(0, 3 - math.floor(math.log10(abs(value))))
    text = f'{value:,.{digits}f}'
    return text.rstrip('0').rstrip('.') if '.' in text else text


@_or_dash
def loss(value: float) -> str:
    """2.3456"""
    return f'{value:.4f}'


@_or_dash
def format_si(value: float) -> str:
    """Three digits and a unit: 1.35B, 84.2M, 512."""
    for unit, size in (('T', 1e12), ('B', 1e9), ('M', 1e6), ('k', 1e3)):
        # What rounds up to the next unit belongs there.
        if abs(value) >= 0.9995 * size:
            return f'{value / size:.3g}{unit}' if abs(value) < 999.5 * size else f'{value / size:.0f}{unit}'
    return f'{value:.3g}'


@_or_dash
def percent(share: float) -> str:
    """Of a share: 0.123 is 12.3%."""
    return f'{100 * share:.1f}%'


@_or_dash
def format_bytes(num_bytes: float) -> str:
    """12.3 GiB"""
    for unit in ('B', 'KiB', 'MiB', 'GiB'):
        if abs(num_bytes) < 1000:
            return f'{num_bytes:.0f} B' if unit == 'B' else f'{num_bytes:.1f} {unit}'
        num_bytes /= 1024
    return f'{num_bytes:,.1f} TiB'


@_or_dash
def dollars(value: float) -> str:
    """$1,234.56; below a dollar with four digits, so that a short run is not free."""
    return f'${value:,.2f}' if abs(value) >= 1 or not value else f'${value:,.4f}'


@_or_dash
def duration(seconds: float) -> str:
    """0.45 s, 12.3 s, 4 min 05 s, 2 h 03 min, 3 d 04 h."""
    if seconds < 9.995:
        return f'{seconds:.2f} s'
    if seconds < 59.95:
        return f'{seconds:.1f} s'
    for limit, unit, small, words in ((_HOUR, _MINUTE, 1, 'min s'), (_DAY, _HOUR, _MINUTE, 'h min')):
        total = round(seconds / small)
        if total * small < limit:
            big, rest = divmod(total, unit // small)
            return f'{big} {words.split()[0]} {rest:02} {words.split()[1]}'
    days, hours = divmod(round(seconds / _HOUR), 24)
    return f'{days} d {hours:02} h'


@_or_dash
def format_time(seconds: float) -> str:
    """Seconds since 1970 as 2026-05-04 13:37:00 UTC."""
    try:
        return f'{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC'
    except (ValueError, OverflowError, OSError):
        return DASH
