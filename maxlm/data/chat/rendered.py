"""Results of chat templates: rendered conversations, spans of their text, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ChatError(ValueError):
    """A template cannot render a conversation. The message is one line."""


class TemplateLimitError(ChatError):
    """Rendering a conversation exceeds a limit of time, memory or output."""


class Span(NamedTuple):
    """Characters [start, stop) of a rendered conversation."""

    start: int
    stop: int


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: the rendered text. In data, the first character of each special token is replaced by a placeholder.
        assistant_spans: for each assistant message, the span that includes the token at the end of its turn. Empty if
            the spans were not requested.
        placeholders: maps each placeholder to its original character.
    """

    text: str
    assistant_spans: tuple[Span, ...]
    placeholders: Mapping[str, str]

    def spelled(self, start: int, stop: int) -> str:
        """Returns the characters [start, stop) with the original characters instead of placeholders."""
        return self.text[start:stop].translate(
            {ord(placeholder): character for placeholder, character in self.placeholders.items()}
        )
