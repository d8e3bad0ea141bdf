"""An HTML document with a Content-Security-Policy that allows only its own style, script and server."""

from __future__ import annotations

import base64
import hashlib

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

# Scripts create HTML only with DOMPurify.
_TRUSTED_TYPES = "require-trusted-types-for 'script'; trusted-types dompurify"


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
                *([f'script-src {_hash(script)}', "connect-src 'self'", _TRUSTED_TYPES] if script else []),
                'img-src data:',
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ]
        )
        self._etag = f'"{hashlib.sha256(self.text.encode()).hexdigest()}"'

    def response(self, request: Request) -> Response:
        """Returns the page, or a response without a body if the browser already has it."""
        headers = {
            'content-security-policy': self.policy,
            'cache-control': 'no-cache',
            'etag': self._etag,
            # Without it, browsers look up the hosts of links that the user has not opened.
            'x-dns-prefetch-control': 'off',
        }
        if self._etag in request.headers.get('if-none-match', ''):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(self.text, headers=headers)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
