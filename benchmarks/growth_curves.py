"""Scaling curves: exponents, a table, and plots with logarithmic axes."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlm.formatting import format_si
from maxlm.planning.plots import BLUE, GREY, ORANGE, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Number of large sizes for the second exponent; at small sizes constant parts dominate.
LAST = 3
# Number of colors of a plot: three line colors and their anti-aliased shades.
COLORS = 64


@dataclasses.dataclass(frozen=True)
class Curve:
    """One measured quantity over the sizes of an axis.

    Attributes:
        name: measured quantity.
        unit: s, B or ''.
        sizes: sizes of the axis, ascending.
        values: value at each size; the median for times.
        expected: exponent for large sizes, or its upper bound if `why` starts with `upper bound`.
        why: reason for the expected exponent.
        control: name, sizes and values of an alternative method, shown for comparison.
    """

    name: str
    unit: str
    sizes: tuple[float, ...]
    values: tuple[float, ...]
    expected: float
    why: str
    control: tuple[str, tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def exponent(self) -> float:
        """Returns the exponent over all sizes."""
        return exponent(self.sizes, self.values)

    @property
    def last_exponent(self) -> float:
        """Returns the exponent over the largest sizes."""
        return exponent(self.sizes[-LAST:], self.values[-LAST:])


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns p if values are proportional to sizes to the power p, by least squares on the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def to_json(curve: Curve) -> dict[str, Any]:
    """Returns the curve and its exponents as JSON data."""
    return {**dataclasses.asdict(curve), 'exponent': curve.exponent, 'last_exponent': curve.last_exponent}


def from_json(facts: dict[str, Any]) -> Curve:
    """Returns the curve that `to_json` wrote."""
    control = facts['control']
    rest = {name: facts[name] for name in ('name', 'unit', 'expected', 'why')}
    return Curve(
        **rest,
        sizes=tuple(facts['sizes']),
        values=tuple(facts['values']),
        control=None if control is None else (control[0], tuple(control[1]), tuple(control[2])),
    )


def table(axis: str, curves: Sequence[Curve]) -> str:
    """Returns a table with a row for each curve: range, first and last value, exponents, expectation and its reason."""
    lines = []
    for curve in curves:
        ends = f'{format_tick(curve.values[0], curve.unit)} … {format_tick(curve.values[-1], curve.unit)}'
        span = f'{format_si(curve.sizes[0])} … {format_si(curve.sizes[-1])}'
        lines.append(
            f'{axis:<14}{curve.name:<34}{span:<18}{ends:<24}{curve.exponent:>6.2f}{curve.last_exponent:>6.2f}'
            f'{curve.expected:>6.3g}  {curve.why}'
        )
    return '\n'.join(lines)


HEADER = f'{"axis":<14}{"figure":<34}{"range":<18}{"from … to":<24}{"all":>6}{"last":>6}{"exp.":>6}  why'


def format_tick(value: float, unit: str) -> str:
    """Formats a value with its unit."""
    if unit == 's':
        for scale, name in ((1, 's'), (1e-3, 'ms'), (1e-6, 'µs')):
            if value >= scale:
                return f'{value / scale:.3g} {name}'
        return f'{value * 1e9:.3g} ns'
    if unit == 'B':
        # Decimal units match the decades of the plots.
        for scale, name in ((1e12, 'TB'), (1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB')):
            if value >= scale:
                return f'{value / scale:.3g} {name}'
        return f'{value:.3g} B'
    return format_si(value)


def picture(title: str, label: str, curves: Sequence[Curve]) -> Figure:
    """Plots a panel for each curve, with the expected slope through its last point."""
    # pyplot would open windows and keep global state.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = 2 if len(curves) in (2, 4) else min(3, len(curves))
    rows = -(-len(curves) // columns)
    with rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.05, hspace=0.05)
        figure = Figure(figsize=(4.4 * columns, 3.6 * rows), layout=layout)
        FigureCanvasAgg(figure)
        for number, curve in enumerate(curves):
            _panel(figure.add_subplot(rows, columns, number + 1), curve, label)
        figure.suptitle(title, x=0.01, ha='left', fontsize=13)
    return figure


def write_small_png(figure: Figure, path: Path) -> None:
    """Writes the figure with COLORS colors, which needs a third of the bytes."""
    from PIL import Image

    data = io.BytesIO()
    # Omitting date and version makes the file reproducible.
    figure.savefig(data, format='png', dpi=120, metadata={'Software': None})
    image = Image.open(data).convert('RGB')
    # Median cut would merge rare colors with similar ones, so the quantization maximizes coverage.
    image = image.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def _panel(axes: Axes, curve: Curve, label: str) -> None:
    axes.set_title(curve.name)
    axes.set_xlabel(label)
    axes.set_xscale('log')
    axes.set_yscale('log')
    guide = [curve.values[-1] * (size / curve.sizes[-1]) ** curve.expected for size in curve.sizes]
    values = [*curve.values, *guide]
    axes.plot(
        curve.sizes, guide, color='black', linewidth=1, linestyle=(0, (4, 3)), label=f'expected: {curve.expected:.3g}'
    )
    axes.plot(
        curve.sizes,
        curve.values,
        color=BLUE,
        linewidth=1.6,
        marker='o',
        markersize=5,
        label=f'exponent {_power(curve.exponent)}; last sizes {_power(curve.last_exponent)}',
    )
    if curve.control:
        name, sizes, control = curve.control
        values += control
        axes.plot(sizes, control, color=ORANGE, linewidth=1.6, marker='s', markersize=5, label=name)
    # Leaves space for the legend. At least one decade is shown, or the noise of a constant would fill the panel.
    low, high = min(values), max(values)
    middle, half = math.sqrt(low * high), max(math.log10(high / low), 1.0) / 2
    axes.set_ylim(middle * 10 ** (-1.1 * half), middle * 10 ** (1.9 * half))
    axes.set_xticks(curve.sizes, [_size(size) for size in curve.sizes])
    axes.minorticks_off()
    _ticks(axes.yaxis, lambda value: format_tick(value, curve.unit), *axes.get_ylim())
    axes.legend(loc='upper left', frameon=False, fontsize=8.5, labelcolor='#333333', edgecolor=GREY)


def _size(size: float) -> str:
    return f'{size:,.0f}'.replace(',', ' ') if size < 1e5 else format_si(size)


def _power(value: float) -> str:
    # Avoids -0.00.
    return f'{value + 0.0:.2f}' if abs(value) >= 0.005 else '0.00'


def _ticks(axis: Any, words: Callable[[float], str], low: float, high: float) -> None:
    """Sets ticks at 1, 2 and 5 of each decade on short axes, and at 1 on long axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axis.set_minor_formatter(NullFormatter())
