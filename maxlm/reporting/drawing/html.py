"""HTML whose text is always escaped: a sample or a config that holds a tag is text, never a tag."""

from __future__ import annotations

import html
import re
from typing import Any

# HTML has no place for control characters, UTF-8 none for halves of surrogate pairs; JSON can hold both.
_UNPRINTABLE = re.compile(r'[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]')
_EMPTY = frozenset({'meta', 'br', 'path', 'rect'})


class Markup(str):
    """HTML that may stand in a page as it is. Only this module makes it."""

    __slots__ = ()


def escape(value: Any) -> Markup:
    """Text as HTML shows it; Markup stays as it is, None is empty."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_UNPRINTABLE.sub('\ufffd', '' if value is None else str(value))))


def tag(element: str, /, *content: Any, **attributes: Any) -> Markup:
    """An element around its escaped content.

    Args:
        element: its name.
        *content: texts and Markup.
        **attributes: `class_` is class, other underscores are hyphens; None and False are left out, True has no value.
    """
    words = [element]
    for name, value in attributes.items():
        name = name.rstrip('_').replace('_', '-')
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words.append(f'{name}="{escape(value)}"')
    start = f'<{" ".join(words)}>'
    if element in _EMPTY and not content:
        return Markup(start.replace('>', '/>') if element in ('path', 'rect') else start)
    return Markup(f'{start}{join(*content)}</{element}>')


def join(*content: Any, by: str = '') -> Markup:
    """Texts and Markup one after the other."""
    return Markup(escape(by).join(escape(one) for one in content))


def table(header: list[Any], rows: list[list[Any]], *, texts: tuple[int, ...] = (0,), class_: str = '') -> Markup:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        header: of the columns.
        rows: their cells; a Markup cell stays as it is.
        texts: numbers of the columns that hold texts; the others hold numbers, to the right.
        class_: of the table; `prose` where the last column is sentences, which go below the rest on a phone.
    """

    def line(element: str, cells: list[Any]) -> Markup:
        # On a phone, cells of a prose table are labelled with their column.
        heads = header if class_ == 'prose' and element == 'td' else [None] * len(cells)
        return tag(
            'tr',
            *(
                tag(element, cell, class_='t' if number in texts else None, data_head=head)
                for number, (cell, head) in enumerate(zip(cells, heads, strict=True))
            ),
        )

    head = tag('thead', line('th', header)) if any(header) else Markup('')
    body = tag('tbody', *(line('td', row) for row in rows))
    return tag('div', tag('table', head, body, class_=class_ or None), class_='scroll', tabindex='0')


def section(name: str, title: str, *content: Any) -> Markup:
    """A part of the page with its heading; '' where there is no content."""
    shown = [one for one in content if one]
    return tag('section', tag('h2', title), *shown, id=name) if shown else Markup('')


def note(*content: Any) -> Markup:
    """A remark below what it is about."""
    return tag('p', *content, class_='note')


def code(text: str) -> Markup:
    """Text as it was written, line breaks included."""
    return tag('pre', text, tabindex='0')
