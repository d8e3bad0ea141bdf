"""Chat page: one HTML document assembled from the files of a directory."""

from __future__ import annotations

from pathlib import Path

from maxlm.serving.pages.html_page import HtmlPage

_FOLDER = Path(__file__).parent / 'chat'
_SCRIPTS = ('markdown.js', 'settings.js', 'client.js', 'conversations.js', 'sidebar.js', 'page.js')


def chat_page() -> HtmlPage:
    """Returns the chat page."""
    script = f"'use strict';\n{''.join(map(_read, _SCRIPTS))}"
    return HtmlPage(_read('page.html'), style=_read('style.css'), script=script)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding='utf-8')
