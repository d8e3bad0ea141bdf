"""An HTML document with a Content-Security-Policy that allows only its own style, script and server."""

from __future__ import annotations

import base64
import hashlib

from starlette.responses import HTMLResponse, Response


class HtmlPage:
    """An HTML document and its security policy.

    Attributes:
        text: HTML.
        policy: Content-Security-Policy that allows only the styles, scripts and endpoints of this server.
    """

    def __init__(self, text: str, *, style: str, script: str = ''):
        """Fills `/* style */` and `/* script */` in an HTML text."""
        self.text = text.replace('/* style */', style).replace('/* script */', script)
        self.policy = '; '.join(
            [
                "default-src 'none'",
                f'style-src {_hash(style)}',
                *([f'script-src {_hash(script)}', "connect-src 'self'"] if script else []),
                'img-src data:',
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ]
        )

    def response(self) -> Response:
        """Returns the page as a response."""
        headers = {'content-security-policy': self.policy, 'cache-control': 'no-cache'}
        return HTMLResponse(self.text, headers=headers)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
