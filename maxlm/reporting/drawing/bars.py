"""Stacked bars: how a whole is made of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxlm.reporting.drawing.html import Markup, join, tag

# The width of the longest bar, which is stretched to the room there is.
_WIDTH, _HEIGHT = 1000.0, 20
# Striped, since this time is gone for nothing.
STRIPED = frozenset({'lost', 'idle'})
_STRIPE = 10.0


class Bar(NamedTuple):
    """Its name, and the size of each part by category."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def draw_bars(bars: Sequence[Bar], *, title: str, words: Mapping[str, str]) -> Markup:
    """Bars below each other on one scale, and what the colours mean; '' where all are empty.

    Args:
        bars: what to draw.
        title: of all.
        words: category → how it is called, in the order in which it is drawn.
    """
    longest = max((bar.total for bar in bars), default=0.0)
    if longest <= 0:
        return Markup('')
    seen = [category for category in words if any(bar.parts.get(category, 0) > 0 for bar in bars)]
    legend = tag('ul', *(tag('li', swatch(category), words[category]) for category in seen), class_='legend')
    rows = [join(tag('div', bar.name, class_='name'), _bar(bar, longest, words)) for bar in bars if bar.total > 0]
    return tag('figure', tag('figcaption', title), legend, tag('div', *rows, class_='bars'))


def swatch(category: str) -> Markup:
    """A square in the colour of a category."""
    return tag('span', class_=f'key t-{category}')


def _bar(bar: Bar, longest: float, words: Mapping[str, str]) -> Markup:
    pieces, left = [], 0.0
    for category, name in words.items():
        seconds = bar.parts.get(category, 0.0)
        if seconds <= 0:
            continue
        width = seconds / longest * _WIDTH
        told = tag('title', f'{name}: {seconds / bar.total:.1%}')
        box = f'M{left:.2f} 0h{width:.2f}v{_HEIGHT}h{-width:.2f}z'
        pieces.append(tag('path', told, d=box, class_=f't-{category}'))
        if category in STRIPED:
            count = int(width / _STRIPE)
            stripes = ''.join(f'M{left + _STRIPE * (number + 0.5):.1f} 0v{_HEIGHT}' for number in range(count))
            pieces.append(tag('path', d=stripes, class_='stripe') if stripes else Markup(''))
        left += width
    spoken = ', '.join(f'{name} {bar.parts[key] / bar.total:.0%}' for key, name in words.items() if bar.parts.get(key))
    return tag(
        'svg',
        *pieces,
        class_='bar',
        viewBox=f'0 0 {_WIDTH:.0f} {_HEIGHT}',
        preserveAspectRatio='none',
        role='img',
        aria_label=f'{bar.name}: {spoken}',
    )
