"""Architecture diagram: the flow from text to a served model, and the layers of packages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from maxlm.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
# Name and first package of each layer, from the lowest. A layer ends before the first package of the next one.
LAYERS = (
    ('Foundation', 'errors'),
    ('Machines and files', 'hardware'),
    ('Data and training', 'data'),
    ('Runs and formats', 'telemetry'),
    ('Use of models', 'inference'),
    ('Pages and dashboards', 'reporting'),
    ('Entry points', 'api'),
)
# Stage, command that runs it, and its result.
FLOW = (
    ('text, chats', 'prepare', 'token shards'),
    ('token shards', 'train · grpo', 'checkpoints'),
    ('checkpoints', 'evaluate · quantize', 'scores, weights'),
    ('checkpoints', 'generate · serve · hf', 'text, API, Hugging Face'),
)
WIDTH, MARGIN, GAP, LABEL = 820, 20, 8, 170
TEXT, BOX, LINE, ACCENT, BACKGROUND = '#1f2933', '#ffffff', '#9aa5b1', '#3f51b5', '#f5f7fa'


def packages() -> list[str]:
    """Returns the top-level packages and modules from the lowest, as in the table of CONTRIBUTING.md."""
    table = (ROOT / 'CONTRIBUTING.md').read_text().split('## Package structure')[1].split('| libraries |')[0]
    names = [name.partition('.')[0] for name in re.findall(r'^\| `([\w.]+)` \|', table, re.MULTILINE)]
    # The layer of a package is that of its last row: `rl.rewards` is lower than `rl`.
    return list(dict.fromkeys(names[::-1]))[::-1]


def layers() -> list[tuple[str, list[str]]]:
    """Returns name and packages of each layer, from the highest."""
    names = packages()
    starts = [*(names.index(first) for _, first in LAYERS), len(names)]
    found = [(label, names[start:stop]) for (label, _), start, stop in zip(LAYERS, starts, starts[1:], strict=False)]
    return [('Commands', list(COMMANDS)), *found[::-1]]


def _text(x: float, y: float, text: str, *, size: int = 14, anchor: str = 'middle', color: str = TEXT) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
        f'dominant-baseline="middle">{escape(text)}</text>'
    )


def _box(x: float, y: float, width: float, height: float, text: str, *, color: str = LINE) -> str:
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{BOX}" stroke="{color}"/>'
    return rect + _text(x + width / 2, y + height / 2, text)


def _flow(y: float) -> list[str]:
    width = (WIDTH - 2 * MARGIN - 3 * 2 * GAP) / len(FLOW)
    parts = []
    for index, (source, command, result) in enumerate(FLOW):
        x = MARGIN + index * (width + 2 * GAP)
        parts += [_text(x + width / 2, y, source), _text(x + width / 2, y + 22, '↓')]
        parts += [_box(x, y + 38, width, 34, command, color=ACCENT)]
        parts += [_text(x + width / 2, y + 88, '↓'), _text(x + width / 2, y + 110, result)]
    return parts


def _rows(names: Sequence[str], available: float) -> list[list[tuple[str, float]]]:
    """Returns the boxes of a layer with their widths, in as many rows as they need."""
    rows: list[list[tuple[str, float]]] = [[]]
    for name in names:
        width = 8.2 * len(name) + 22
        if sum(each + GAP for _, each in rows[-1]) + width > available:
            rows.append([])
        rows[-1].append((name, width))
    return rows


def architecture() -> str:
    """Returns docs/figures/architecture.svg."""
    parts = [_text(MARGIN, 28, 'From text to a served model', size=16, anchor='start', color=ACCENT), *_flow(60)]
    y = 216.0
    parts.append(_text(MARGIN, y, 'Packages: imports point only downward', size=16, anchor='start', color=ACCENT))
    y += 24
    for label, names in layers():
        rows = _rows(names, WIDTH - 2 * MARGIN - LABEL)
        for row, boxes in enumerate(rows):
            x = float(MARGIN + LABEL)
            for name, width in boxes:
                parts.append(_box(x, y + row * 36, width, 28, name))
                x += width + GAP
        parts.append(_text(MARGIN, y + 14, label, anchor='start'))
        y += 36 * len(rows) + 10
    height = y + 8
    title = 'Data flow of the commands, and layers of the packages'
    return '\n'.join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            'font-family="system-ui, sans-serif">',
            f'<title>{title}</title>',
            f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="{BACKGROUND}"/>',
            *parts,
            '</svg>',
            '',
        ]
    )
