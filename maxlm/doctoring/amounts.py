"""Amounts as findings tell them. Nothing here needs JAX: a machine is looked at before it has one."""

from __future__ import annotations

GIB = 2**30


def in_gib(size: float) -> str:
    """Bytes in GiB, small ones in MiB."""
    if size < 0.1 * GIB:
        return f'{size / 2**20:.1f} MiB'
    return f'{size / GIB:.2f} GiB' if size < 10 * GIB else f'{size / GIB:,.0f} GiB'


def plural(count: int, noun: str) -> str:
    """`1 device`, `2 devices`."""
    return f'{count:,} {noun}{"" if count == 1 else "s"}'
