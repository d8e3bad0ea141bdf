"""Stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxlm.reporting.drawing.html import Markup, join, tag

# The width of the longest bar, in SVG units. The SVG is stretched to the available width.
_WIDTH, _HEIGHT = 1000.0, 20
# Categories of wasted time, which are drawn with stripes.
STRIPED = frozenset({'lost', 'idle'})
_STRIPE = 10.0


class Bar(NamedTuple):
    """A name and the seconds of each category."""

    name: str
    seconds_by_category: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds_by_category.values())


def draw_bars(bars: Sequence[Bar], *, title: str, labels: Mapping[str, str]) -> Markup:
    """Draws bars below each other on one scale, with a legend; '' if all are empty.

    Args:
        bars: the bars.
        title: title of the figure.
        labels: category → its label, in drawing order.
    """
    max_total = max((bar.total for bar in bars), default=0.0)
    if max_total <= 0:
        return Markup('')
    categories = [category for category in labels if any(bar.seconds_by_category.get(category, 0) > 0 for bar in bars)]
    legend = tag('ul', *(tag('li', swatch(category), labels[category]) for category in categories), class_='legend')
    rows = [join(tag('div', bar.name, class_='name'), _bar(bar, max_total, labels)) for bar in bars if bar.total > 0]
    return tag('figure', tag('figcaption', title), legend, tag('div', *rows, class_='bars'))


def swatch(category: str) -> Markup:
    """Returns a square in the color of a category."""
    return tag('span', class_=f'key t-{category}')


def _bar(bar: Bar, max_total: float, labels: Mapping[str, str]) -> Markup:
    elements, x = [], 0.0
    for category, name in labels.items():
        seconds = bar.seconds_by_category.get(category, 0.0)
        if seconds <= 0:
            continue
        width = seconds / max_total * _WIDTH
        tooltip = tag('title', f'{name}: {seconds / bar.total:.1%}')
        box = f'M{x:.2f} 0h{width:.2f}v{_HEIGHT}h{-width:.2f}z'
        elements.append(tag('path', tooltip, d=box, class_=f't-{category}'))
        if category in STRIPED:
            count = int(width / _STRIPE)
            stripes = ''.join(f'M{x + _STRIPE * (number + 0.5):.1f} 0v{_HEIGHT}' for number in range(count))
            elements.append(tag('path', d=stripes, class_='stripe') if stripes else Markup(''))
        x += width
    description = ', '.join(
        f'{name} {bar.seconds_by_category[key] / bar.total:.0%}'
        for key, name in labels.items()
        if bar.seconds_by_category.get(key)
    )
    return tag(
        'svg',
        *elements,
        class_='bar',
        viewBox=f'0 0 {_WIDTH:.0f} {_HEIGHT}',
        preserveAspectRatio='none',
        role='img',
        aria_label=f'{bar.name}: {description}',
    )
