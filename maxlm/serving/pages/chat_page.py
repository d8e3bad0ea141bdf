"""Chat page: one HTML document assembled from the files of a directory."""

from __future__ import annotations

from pathlib import Path

from maxlm.serving.pages.html_page import HtmlPage

_FOLDER = Path(__file__).parent / 'chat'
_LIBRARIES = ('markdown-it.umd.min.js', 'purify.min.js')
_SCRIPTS = (
    'elements.js',
    'markdown.js',
    'settings.js',
    'client.js',
    'conversations.js',
    'sidebar.js',
    'model_info.js',
    'page.js',
)


def chat_page() -> HtmlPage:
    """Returns the chat page."""
    script = '\n'.join(["'use strict';", *map(_read, (*_LIBRARIES, *_SCRIPTS))])
    return HtmlPage(_read('page.html'), style=_read('style.css'), script=script)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding='utf-8')
