"""Chat page: one HTML document assembled from the files of a directory."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent / 'page'
_SCRIPTS = ('markdown.js', 'settings.js', 'client.js', 'page.js')


class Page:
    """HTML of the chat page and its security policy.

    Attributes:
        text: HTML.
        policy: Content-Security-Policy that allows only the styles, scripts and endpoints of this server.
    """

    def __init__(self) -> None:
        style = _read('style.css')
        script = f"'use strict';\n{''.join(map(_read, _SCRIPTS))}"
        self.text = _read('page.html').replace('/* style */', style).replace('/* script */', script)
        self.policy = '; '.join(
            [
                "default-src 'none'",
                f'style-src {_hash(style)}',
                f'script-src {_hash(script)}',
                "connect-src 'self'",
                'img-src data:',
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ]
        )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding='utf-8')


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
