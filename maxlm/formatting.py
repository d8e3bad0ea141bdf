"""Formats numbers as text: counts, losses, sizes, rates, durations, dollars and times.

Sizes are binary (GiB = 2**30 bytes). Rates are decimal (GB/s = 10**9 bytes per second), as in data sheets. None and
values that are not finite are formatted as a dash.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable

DASH = '–'
GIB = 2**30
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def _or_dash(write: Callable[[float], str]) -> Callable[[float | None], str]:
    def written(value: float | None) -> str:
        return DASH if value is None or not math.isfinite(value) else write(value)

    written.__doc__ = write.__doc__
    return written


def plural(count: int, noun: str) -> str:
    """Formats a count: `1 device`, `2 devices`, `2 micro-batches`."""
    ending = 'es' if noun.endswith(('ch', 's', 'x')) else 's'
    return f'{count:,} {noun}{"" if count == 1 else ending}'


@_or_dash
def format_int(value: float) -> str:
    """Formats an integer with thousands separators: 12,345."""
    return f'{value:,.0f}'


@_or_dash
def format_number(value: float) -> str:
    """Formats a number with four significant digits: 0.002, 3.142, 12,350, 1.2e-07."""
    if value and not 1e-4 <= abs(value) < 1e9:
        return f'{value:.4g}'
    digits = 0 if not value else max(0, 3 - math.floor(math.log10(abs(value))))
    text = f'{value:,.{digits}f}'
    return text.rstrip('0').rstrip('.') if '.' in text else text


@_or_dash
def format_loss(value: float) -> str:
    """Formats a loss with four decimals: 2.3456."""
    return f'{value:.4f}'


@_or_dash
def format_si(value: float) -> str:
    """Formats a number with three significant digits and a suffix: 1.35B, 84.2M, 512."""
    for suffix, size in (('T', 1e12), ('B', 1e9), ('M', 1e6), ('k', 1e3)):
        # A value that rounds up to the next suffix gets that suffix.
        if abs(value) >= 0.9995 * size:
            return f'{value / size:.3g}{suffix}' if abs(value) < 999.5 * size else f'{value / size:.0f}{suffix}'
    return f'{value:.3g}'


@_or_dash
def format_percent(fraction: float) -> str:
    """Formats a fraction as a percentage: 0.123 → 12.3%."""
    return f'{100 * fraction:.1f}%'


@_or_dash
def format_bytes(num_bytes: float) -> str:
    """Formats a size in binary units: 900 B, 84.2 MiB, 1.25 GiB, 12.3 GiB."""
    for unit in ('B', 'KiB', 'MiB', 'GiB'):
        if abs(num_bytes) < 999.95:
            return f'{num_bytes:.0f} B' if unit == 'B' else f'{num_bytes:.{_decimals(num_bytes)}f} {unit}'
        num_bytes /= 1024
    return f'{num_bytes:,.{_decimals(num_bytes)}f} TiB'


@_or_dash
def format_rate(bytes_per_second: float) -> str:
    """Formats bytes per second in decimal units: 900 B/s, 5.00 MB/s, 450.0 GB/s."""
    for unit in ('B/s', 'kB/s', 'MB/s'):
        if abs(bytes_per_second) < 999.95:
            decimals = 0 if unit == 'B/s' else _decimals(bytes_per_second)
            return f'{bytes_per_second:.{decimals}f} {unit}'
        bytes_per_second /= 1000
    return f'{bytes_per_second:,.{_decimals(bytes_per_second)}f} GB/s'


def _decimals(value: float) -> int:
    return 2 if abs(value) < 9.995 else 1


@_or_dash
def format_dollars(value: float) -> str:
    """Formats dollars: $1,234.56; below one dollar with four decimals, so that a short run does not cost $0.00."""
    return f'${value:,.2f}' if abs(value) >= 1 or not value else f'${value:,.4f}'


@_or_dash
def format_duration(seconds: float) -> str:
    """Formats a duration: 0.45 s, 12.3 s, 4 min 05 s, 2 h 03 min, 3 d 04 h."""
    if seconds < 9.995:
        return f'{seconds:.2f} s'
    if seconds < 59.95:
        return f'{seconds:.1f} s'
    for limit, unit, small, units in ((_HOUR, _MINUTE, 1, 'min s'), (_DAY, _HOUR, _MINUTE, 'h min')):
        total = round(seconds / small)
        if total * small < limit:
            big, rest = divmod(total, unit // small)
            return f'{big} {units.split()[0]} {rest:02} {units.split()[1]}'
    days, hours = divmod(round(seconds / _HOUR), 24)
    return f'{days} d {hours:02} h'


@_or_dash
def format_time(seconds: float) -> str:
    """Formats seconds since 1970 as a time: 2026-05-04 13:37:00 UTC."""
    try:
        return f'{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC'
    except (ValueError, OverflowError, OSError):
        return DASH
