"""How a figure grows with a size: the exponent, the table of all, and pictures on logarithmic axes."""

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

# Sizes at the end of a curve that tell what large ones do: at the small end what does not grow has the larger part.
LAST = 3
# Of a picture: lines of three colors, and what is between them and white.
COLORS = 64


@dataclasses.dataclass(frozen=True)
class Curve:
    """One figure over the sizes of an axis.

    Attributes:
        name: what was measured.
        unit: s, B or ''.
        sizes: along the axis, ascending.
        values: at each size, a median where it is a time.
        expected: exponent for large sizes, an upper bound where it says so in `why`.
        why: that is what it should be.
        control: what the same would be, done in another way: sizes, values and its name; shown beside it.
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
        """Over all sizes."""
        return exponent(self.sizes, self.values)

    @property
    def last_exponent(self) -> float:
        """Over the largest sizes."""
        return exponent(self.sizes[-LAST:], self.values[-LAST:])


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the line of least squares through the logarithms: p where values are as sizes to the power p."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def to_json(curve: Curve) -> dict[str, Any]:
    """The curve and its exponents."""
    return {**dataclasses.asdict(curve), 'exponent': curve.exponent, 'last_exponent': curve.last_exponent}


def from_json(facts: dict[str, Any]) -> Curve:
    """What `to_json` wrote."""
    control = facts['control']
    rest = {name: facts[name] for name in ('name', 'unit', 'expected', 'why')}
    return Curve(
        **rest,
        sizes=tuple(facts['sizes']),
        values=tuple(facts['values']),
        control=None if control is None else (control[0], tuple(control[1]), tuple(control[2])),
    )


def table(axis: str, curves: Sequence[Curve]) -> str:
    """A line for each curve: range, values at its ends, exponents, and what is expected and why."""
    lines = []
    for curve in curves:
        ends = f'{told(curve.values[0], curve.unit)} … {told(curve.values[-1], curve.unit)}'
        span = f'{format_si(curve.sizes[0])} … {format_si(curve.sizes[-1])}'
        lines.append(
            f'{axis:<14}{curve.name:<34}{span:<18}{ends:<24}{curve.exponent:>6.2f}{curve.last_exponent:>6.2f}'
            f'{curve.expected:>6.3g}  {curve.why}'
        )
    return '\n'.join(lines)


HEADER = f'{"axis":<14}{"figure":<34}{"range":<18}{"from … to":<24}{"all":>6}{"last":>6}{"exp.":>6}  why'


def told(value: float, unit: str) -> str:
    """A value with its unit, short."""
    if unit == 's':
        for scale, name in ((1, 's'), (1e-3, 'ms'), (1e-6, 'µs')):
            if value >= scale:
                return f'{value / scale:.3g} {name}'
        return f'{value * 1e9:.3g} ns'
    if unit == 'B':
        # Decimal, as the decades of the pictures are.
        for scale, name in ((1e12, 'TB'), (1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB')):
            if value >= scale:
                return f'{value / scale:.3g} {name}'
        return f'{value:.3g} B'
    return format_si(value)


def picture(title: str, label: str, curves: Sequence[Curve]) -> Figure:
    """A panel for each curve, with the slope that is expected of large sizes through its last point."""
    # Without pyplot: no window, no state that lives on.
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
    """The picture in COLORS colors, which takes a third of the bytes."""
    from PIL import Image

    data = io.BytesIO()
    # Neither date nor version: the same figures give the same file.
    figure.savefig(data, format='png', dpi=120, metadata={'Software': None})
    image = Image.open(data).convert('RGB')
    # By coverage: the median cut gives a color that few pixels have to its neighbours.
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
        label=f'exponent {_power(curve.exponent)}, at the end {_power(curve.last_exponent)}',
    )
    if curve.control:
        name, sizes, control = curve.control
        values += control
        axes.plot(sizes, control, color=ORANGE, linewidth=1.6, marker='s', markersize=5, label=name)
    # Room for the legend above, and a decade at least: noise of what stays the same would fill the panel.
    low, high = min(values), max(values)
    middle, half = math.sqrt(low * high), max(math.log10(high / low), 1.0) / 2
    axes.set_ylim(middle * 10 ** (-1.1 * half), middle * 10 ** (1.9 * half))
    axes.set_xticks(curve.sizes, [_size(size) for size in curve.sizes])
    axes.minorticks_off()
    _ticks(axes.yaxis, lambda value: told(value, curve.unit), *axes.get_ylim())
    axes.legend(loc='upper left', frameon=False, fontsize=8.5, labelcolor='#333333', edgecolor=GREY)


def _size(size: float) -> str:
    return f'{size:,.0f}'.replace(',', ' ') if size < 1e5 else format_si(size)


def _power(value: float) -> str:
    # Not -0.00.
    return f'{value + 0.0:.2f}' if abs(value) >= 0.005 else '0.00'


def _ticks(axis: Any, words: Callable[[float], str], low: float, high: float) -> None:
    """1, 2 and 5 of each decade where the axis is short, only 1 where it is long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axis.set_minor_formatter(NullFormatter())
