"""Plots of sweeps and budgets: PNG files, and a self-contained HTML page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlm.errors import explain_os_errors
from maxlm.formatting import format_si
from maxlm.planning.budget import BudgetPlan
from maxlm.planning.scaling import ScalingRow
from maxlm.planning.tables import BUDGET_HEADER, SCALING_HEADER, budget_cells, scaling_cells
from maxlm.storage.atomic import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Wong 2011, "Points of view: Color blindness": distinguishable by everyone, and in gray by lightness.
BLUE, ORANGE, GREY = '#0072B2', '#D55E00', '#767676'
# kind → color, marker, marker size, line width, label. The weak curve is wide and drawn first, so that the strong curve
# stays visible where both coincide.
CURVES = {
    'weak': (ORANGE, 's', 8.0, 3.2, 'batch grows with devices'),
    'strong': (BLUE, 'o', 5.0, 1.6, 'fixed batch'),
}
STYLE: dict[str, Any] = {
    'font.family': 'DejaVu Sans',
    'font.size': 10,
    'axes.titlesize': 11,
    'axes.titleweight': 'bold',
    'axes.titlelocation': 'left',
    'axes.titlepad': 10,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.edgecolor': GREY,
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.color': '#e4e4e4',
    'grid.linewidth': 0.8,
    'xtick.color': '#333333',
    'ytick.color': '#333333',
    'legend.frameon': False,
    # Keep the text of an SVG as text.
    'svg.fonttype': 'none',
    # Make the output deterministic.
    'svg.hashsalt': 'maxlm',
}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }}
h2 {{ font-size: 1.15rem; margin-top: 2.5rem; }}
svg {{ max-width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }}
th {{ border-bottom: 2px solid #767676; }}
th:first-child, td:first-child {{ text-align: left; }}
p.note {{ color: #555; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def scaling_figure(rows: Sequence[ScalingRow], title: str) -> Figure:
    """Plots tokens/s and MFU over numbers of devices, for strong and weak scaling."""
    figure, (speed, mfu) = _figure(title, 'tokens/s', 'MFU (fraction of peak)')
    shown = [row for row in rows if row.kind in CURVES and not row.refusal]
    for kind, (color, marker, size, width, description) in CURVES.items():
        curve = [row for row in shown if row.kind == kind]
        if not curve:
            continue
        counts = [row.num_devices for row in curve]
        for axes, values in ((speed, [row.tokens_per_second for row in curve]), (mfu, [row.mfu for row in curve])):
            axes.plot(counts, values, color=color, linewidth=width, label=f'{kind}: {description}')
            _points(axes, counts, values, [row.fits for row in curve], color, marker, size)
    usable = [row for row in shown if row.usable] or shown
    if usable:
        first = min(usable, key=lambda row: row.num_devices)
        ends = [first.num_devices, max(row.num_devices for row in shown)]
        ideal = [first.tokens_per_second * count / ends[0] for count in ends]
        speed.plot(ends, ideal, color='black', linewidth=1, linestyle=(0, (4, 3)), label='ideal')
        speed.set_yscale('log')
        _ticks(speed.yaxis, format_si)
    for axes in (speed, mfu):
        axes.set_xscale('log', base=2)
        axes.set_xlabel('devices')
        counts = sorted({row.num_devices for row in shown})
        # Label every count if they fit on the axis, otherwise every second or third, starting from the last.
        counts = counts[::-1][:: len(counts) // 11 + 1]
        axes.set_xticks(counts, [f'{count:,}'.replace(',', ' ') for count in counts])
        axes.minorticks_off()
    _percent(mfu)
    _legend(speed, any(not row.fits for row in shown), 'upper left')
    return figure


def budget_figure(plan: BudgetPlan, title: str) -> Figure:
    """Plots loss and tokens over the size of the model, for one budget."""
    figure, (loss, tokens) = _figure(title, 'predicted loss (nats/token)', 'tokens that the budget allows')
    rows = sorted(plan.rows, key=lambda row: row.parameters)
    sizes, fits = [row.parameters for row in rows], [row.fits for row in rows]
    for axes, values in ((loss, [row.loss for row in rows]), (tokens, [row.tokens for row in rows])):
        axes.plot(sizes, values, color=BLUE, linewidth=2, label='model sizes')
        _points(axes, sizes, values, fits, BLUE, 'o')
    best = plan.optimum
    # Place labels away from the curves: above the lowest point, and right of the crossing.
    for axes, value, text, offset, align in (
        (loss, best.loss, f'{format_si(best.parameters)}: {best.loss:.3f}', (0, 18), 'center'),
        (tokens, best.tokens, f'{format_si(best.parameters)} on {format_si(best.tokens)}', (16, -4), 'left'),
    ):
        at = (best.parameters, value)
        axes.plot(*at, marker='*', markersize=15, color=ORANGE, linestyle='', label='best')
        axes.annotate(text, at, offset, textcoords='offset points', ha=align, color=ORANGE, weight='bold')
        axes.set_xscale('log')
        axes.set_xlabel('parameters')
        axes.set_xticks(sizes, [format_si(size) for size in sizes])
        axes.tick_params(axis='x', labelrotation=35)
        axes.minorticks_off()
    tokens.set_yscale('log')
    balanced = [20 * size for size in sizes]
    tokens.plot(sizes, balanced, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), label='20 tokens per parameter')
    _ticks(tokens.yaxis, format_si)
    loss.margins(y=0.15)
    _legend(loss, not all(fits), 'upper right')
    _legend(tokens, False, 'best')
    return figure


def write_png(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG. Raises InputError if the file cannot be written."""
    data = io.BytesIO()
    # Omit date and version, so that the same figure gives the same file.
    figure.savefig(data, format='png', dpi=150, metadata={'Software': None})
    _write(path, data.getvalue())


def write_html(
    path: Path,
    title: str,
    *,
    rows: Sequence[ScalingRow] = (),
    plan: BudgetPlan | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Writes a page with the plots, their tables and notes. Raises InputError if the file cannot be written."""
    parts = [f'<p class="note">{html.escape(note)}</p>' for note in notes]
    curves, sizes = [row for row in rows if row.kind in CURVES], [row for row in rows if row.kind not in CURVES]
    if curves:
        parts += [
            '<h2>Scaling with the number of devices</h2>',
            _svg(scaling_figure(curves, ''), 'scaling'),
            _scaling_table(curves),
        ]
    if sizes:
        parts += ['<h2>Model sizes</h2>', _scaling_table(sizes)]
    if plan:
        cells = [budget_cells(row, plan) for row in plan.rows]
        parts += [
            '<h2>Model sizes for the budget</h2>',
            _svg(budget_figure(plan, ''), 'budget'),
            _table(BUDGET_HEADER, cells),
        ]
        parts.append(f'<p class="note">Scaling law: {html.escape(plan.law.source)}</p>')
    _write(path, PAGE.format(title=html.escape(title), body='\n'.join(parts)).encode())


def _figure(title: str, *panels: str) -> tuple[Figure, list[Axes]]:
    # Avoid pyplot, which opens windows and keeps global state.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.06)
    with rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(panels), 4.4), layout=layout)
        FigureCanvasAgg(figure)
        axes = [figure.add_subplot(1, len(panels), number + 1) for number in range(len(panels))]
        for panel, label in zip(axes, panels, strict=True):
            panel.set_title(label)
        if title:
            figure.suptitle(title, x=0.01, ha='left', fontsize=13)
    return figure, axes


def _points(
    axes: Axes, x: Sequence[float], y: Sequence[float], fits: Sequence[bool], color: str, marker: str, size: float = 6.0
) -> None:
    """Plots points, filled if the run fits into memory and hollow if it does not."""
    for filled in (True, False):
        chosen = [pair for pair, fit in zip(zip(x, y, strict=True), fits, strict=True) if fit is filled]
        if chosen:
            face = color if filled else 'white'
            axes.plot(*zip(*chosen, strict=True), linestyle='', marker=marker, markersize=size, color=color, mfc=face)


def _ticks(axis: Any, format_value: Callable[[float], str]) -> None:
    """Formats a logarithmic axis: ticks at 1, 2 and 5 of each decade if it is short, only at 1 if it is long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / low < 300 else (1,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    axis.set_minor_formatter(NullFormatter())


def _percent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    highest = axes.dataLim.y1
    axes.set_ylim(0, 1.15 * highest if highest > 0 else 1.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _legend(axes: Axes, some_do_not_fit: bool, loc: str) -> None:
    if some_do_not_fit:
        axes.plot([], [], linestyle='', marker='o', markersize=6, color=GREY, mfc='white', label='does not fit')
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=loc, frameon=False)


def _svg(figure: Figure, name: str) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(text, format='svg', metadata={'Date': None, 'Creator': None})
    # An XML declaration is invalid inside an HTML page. IDs get a prefix, because they must be unique on the page.
    picture = text.getvalue()[text.getvalue().index('<svg') :]
    return re.sub(r'(\bid="|url\(#|href="#)', rf'\g<1>{name}-', picture)


def _scaling_table(rows: Sequence[ScalingRow]) -> str:
    notes = [f'{row.kind} on {row.num_devices}: {row.refusal}' for row in rows if row.refusal]
    lines = [_table(SCALING_HEADER, [scaling_cells(row) for row in rows])]
    return '\n'.join([*lines, *(f'<p class="note">{html.escape(note)}</p>' for note in notes)])


def _table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return '<tr>' + ''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells) + '</tr>'

    rows = '\n'.join([line('th', header), *(line('td', row) for row in cells)])
    return f'<div class="scroll"><table>\n{rows}\n</table></div>'


def _write(path: Path, data: bytes) -> None:
    with explain_os_errors(path, 'choose a writable file'):
        replace_file(path, data)
