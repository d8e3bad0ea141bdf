"""Arranges text fields in the lines of a dashboard, without splitting fields across lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

SEPARATOR = ' · '
ELLIPSIS = '…'


def field(label: str, value: str, style: str = 'bold') -> Text:
    """Returns a name and its value, e.g. `loss 2.3456`."""
    return Text.assemble((f'{label} ', 'dim'), (value, style)) if label else Text(value, style=style)


def flow(fields: Iterable[Text], width: int, *, separator: str = SEPARATOR) -> list[Text]:
    """Arranges fields in lines of at most `width` characters; a field wider than a line is truncated between words."""
    lines: list[Text] = []
    for field_text in fields:
        if lines and lines[-1].cell_len + cell_len(separator) + field_text.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], (separator, 'dim'), field_text)
        else:
            lines.append(
                field_text if field_text.cell_len <= width else truncate(field_text.plain, width, field_text.style)
            )
    return lines


def truncate(text: str, width: int, style: object = '') -> Text:
    """Returns a message on one line, truncated between words if it is too wide, so that numbers stay complete."""
    text = plain(text)
    if cell_len(text) > width:
        words, text = text.split(' '), ''
        for word in words:
            longer = f'{text} {word}' if text else word
            if cell_len(longer) + 2 > width:
                break
            text = longer
        text = f'{text} {ELLIPSIS}'.strip() if text else set_cell_size(words[0], max(width - 1, 0)) + ELLIPSIS
    return Text(set_cell_size(text, width) if cell_len(text) > width else text, style=str(style))


def plain(text: str) -> str:
    """Returns a text on one line, without control characters."""
    return ''.join(letter if letter.isprintable() else ' ' for letter in ' '.join(text.split()))


def columns(rows: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Formats a table without borders. Columns that do not fit are omitted, starting from the right.

    The first column is left-aligned, the rest right-aligned. All rows have the same length; cells may be empty.
    """
    if not rows:
        return []
    widths = [max(row[number].cell_len for row in rows) for number in range(len(rows[0]))]
    lines = []
    for row in rows:
        line = Text()
        for number, (cell, size) in enumerate(zip(row, widths, strict=True)):
            if not size:
                continue
            gap = '  ' if line.cell_len else ''
            if line.cell_len + cell_len(gap) + size > width:
                break
            padding = ' ' * (size - cell.cell_len)
            line = Text.assemble(line, gap, cell, padding) if not number else Text.assemble(line, gap, padding, cell)
        lines.append(line)
    return lines


def bar(fraction: float, width: int, style: str, *, full: str = '━', rest: str = '─') -> Text:
    """Draws a bar that is filled by a fraction from 0 to 1."""
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    return Text.assemble((full * filled, style), (rest * (width - filled), 'dim'))


def fit(line: Text, width: int) -> Text:
    """Pads or truncates a line to `width`."""
    line = line.copy()
    line.truncate(width, pad=True)
    return line
