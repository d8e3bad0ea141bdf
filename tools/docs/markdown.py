"""Plain text as Markdown."""

from __future__ import annotations

import re


def escaped(text: str) -> str:
    """Returns text in which the characters of HTML and emphasis are literal. Code in backticks stays unchanged."""
    parts = re.split(r'(`[^`]*`)', text)
    parts[::2] = [re.sub(r'([*[\]])', r'\\\1', part.replace('<', '&lt;')) for part in parts[::2]]
    return ''.join(parts)
