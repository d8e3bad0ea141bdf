"""Renders untrusted chat templates in a separate process with limits of CPU time, memory and output.

A template can run forever in nested loops, or build a text of any length with one operator. Restricting the operators
would not cover all filters. A request is the JSON list `[source, method, arguments…]`, and the result is JSON.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.data.chat.jinja import JinjaTemplate, TemplateProperties
from maxlm.data.chat.rendered import ChatError, Rendered, Span, TemplateLimitError
from maxlm.data.documents.messages import Message
from maxlm.errors import InputError
from maxlm.sandbox.limited_process import LimitError, ProcessLimits, limited_process
from maxlm.storage.json_text import parse_json

# Number of compiled templates in the cache.
_KEPT = 8
# Limits of short and of long requests. They have different processes, so that a long request delays no short one.
_SHORT, _LONG = ProcessLimits(cpu_seconds=5.0), ProcessLimits(cpu_seconds=20.0)
_MAX_SHORT_BYTES = 128 << 10


class RemoteTemplate:
    """A template that another process compiles and renders. It has the methods of JinjaTemplate.

    Attributes:
        properties: properties of the template.
    """

    def __init__(self, source: str, limits: ProcessLimits | None = None):
        """Raises ChatError if `source` is not a valid template or exceeds the limits."""
        self._source, self._limits = source, limits
        texts, undeclared, has_generation = self._call('properties')
        self.properties = TemplateProperties(tuple(texts), tuple(undeclared), has_generation)

    def render(self, messages: Sequence[Message], **options: Any) -> Rendered:
        """See JinjaTemplate. Also raises ChatError if the template exceeds the limits."""
        return _rendered(self._call('render', list(messages), options))

    def render_with_spans(self, messages: Sequence[Message], **options: Any) -> Rendered:
        """See JinjaTemplate. Also raises ChatError if the template exceeds the limits."""
        return _rendered(self._call('render_with_spans', list(messages), options))

    def end_of_turn(self, special: Sequence[str]) -> str:
        """See JinjaTemplate. Also raises ChatError if the template exceeds the limits."""
        return str(self._call('end_of_turn', list(special)))

    def _call(self, *request: Any) -> Any:
        try:
            data = json.dumps([self._source, *request], default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatError(f'cannot render a message: {error}') from None
        try:
            limits = self._limits or (_SHORT if len(data) <= _MAX_SHORT_BYTES else _LONG)
            return parse_json(limited_process(f'{__name__}:answer', limits).call(data))
        except InputError as error:
            raise ChatError(str(error)) from None
        except (LimitError, ValueError) as error:
            raise TemplateLimitError(f'the chat template {error}') from None


def answer(request: bytes) -> bytes:
    """Returns the result of a request. Raises InputError if the template fails, and MemoryError."""
    source, method, *arguments = json.loads(request)
    try:
        template = _compiled(source)
        if method == 'properties':
            result: Any = template.properties
        elif method == 'end_of_turn':
            result = template.end_of_turn(*arguments)
        else:
            messages, options = arguments
            result = getattr(template, method)(messages, **options)
    except ChatError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise InputError(str(error)) from None
    return json.dumps(result).encode()


_compiled = functools.lru_cache(_KEPT)(JinjaTemplate)


def _plain(value: Any) -> Any:
    """Converts a value that JSON does not support, such as a date, to a dict or text."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _rendered(result: Sequence[Any]) -> Rendered:
    text, spans, placeholders = result
    return Rendered(text, tuple(Span(*span) for span in spans), placeholders)
