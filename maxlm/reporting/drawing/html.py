"""Builds HTML whose text is always escaped, so tags in a sample or a config are shown as text."""

from __future__ import annotations

import html
import re
from typing import Any

# HTML does not allow control characters, and UTF-8 no surrogates; JSON can contain both.
_UNPRINTABLE = re.compile(r'[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]')
_EMPTY = frozenset({'meta', 'br', 'path', 'rect'})


class Markup(str):
    """HTML that does not need to be escaped. Only this module creates it, except for constants."""

    __slots__ = ()


def escape(value: Any) -> Markup:
    """Escapes text for HTML. Markup is returned unchanged, and None is empty."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_UNPRINTABLE.sub('\ufffd', '' if value is None else str(value))))


def tag(element: str, /, *content: Any, **attributes: Any) -> Markup:
    """Returns an element with its escaped content.

    Args:
        element: name of the element.
        *content: texts and Markup.
        **attributes: `class_` is class, and other underscores are hyphens. None and False omit the attribute; True
            gives it no value.
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
    """Joins texts and Markup."""
    return Markup(escape(by).join(escape(one) for one in content))


def table(header: list[Any], rows: list[list[Any]], *, texts: tuple[int, ...] = (0,), class_: str = '') -> Markup:
    """Returns a table that scrolls horizontally if it is wider than the page.

    Args:
        header: titles of the columns.
        rows: cells; Markup is not escaped.
        texts: indices of the columns with text. All other columns contain numbers and are right-aligned.
        class_: CSS class of the table. `prose`: the last column contains sentences, which are shown below the row on a
            phone.
    """

    def line(element: str, cells: list[Any]) -> Markup:
        # On a phone, cells of a prose table are labeled with their column.
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
    """Returns a section of the page with its heading; '' if it has no content."""
    shown = [one for one in content if one]
    return tag('section', tag('h2', title), *shown, id=name) if shown else Markup('')


def note(*content: Any) -> Markup:
    """Returns a paragraph with a remark."""
    return tag('p', *content, class_='note')


def code(text: str) -> Markup:
    """Returns preformatted text, including line breaks."""
    return tag('pre', text, tabindex='0')
