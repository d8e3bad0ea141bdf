"""Renders untrusted chat templates in a separate process with limits of CPU time and memory.

A template can run forever in nested loops, or build a text of any length with one operator. Restricting the operators
would not cover all filters. Therefore the kernel kills the process at its limits.

A request consists of the source of a template and a JSON list `[method, arguments…]`. The response is the JSON list
`['value', result]` or `['error', message]`. Each part is preceded by its length.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import maxlm
from maxlm.data.chat.jinja import JinjaTemplate, TemplateFacts
from maxlm.data.chat.rendered import ChatError, Rendered, Span
from maxlm.data.documents.messages import Message
from maxlm.storage.json_text import parse_json

_LENGTH = struct.Struct('>Q')
# The process ignores the environment and the user's site directory. It imports modules from the paths of its parent.
_COMMAND = (
    *('-I', '-S', '-c'),
    'import sys; sys.path[:] = sys.argv[2:]; from maxlm.data.chat.template_process import main; main(sys.argv[1])',
)
# Number of compiled templates in the cache.
_KEPT = 8


class RenderLimits(NamedTuple):
    """Limits for rendering one conversation.

    Attributes:
        cpu_seconds: CPU time. The kernel rounds it up to full seconds.
        memory_bytes: address space.
        memory_per_byte: additional address space per byte of the request.
        output_bytes: number of characters of the rendered conversation.
        output_per_byte: additional characters per byte of the request.
    """

    cpu_seconds: float = 20.0
    memory_bytes: int = 512 << 20
    memory_per_byte: int = 64
    output_bytes: int = 16 << 20
    output_per_byte: int = 16

    @property
    def seconds(self) -> float:
        """Timeout in seconds, which applies even if the process uses little CPU time."""
        return 30 + 5 * self.cpu_seconds


class RemoteTemplate:
    """A template that another process compiles and renders. It has the methods of JinjaTemplate.

    Attributes:
        facts: properties of the template.
    """

    def __init__(self, source: str, limits: RenderLimits | None = None):
        """Raises ChatError if `source` is not a valid template or exceeds the limits."""
        self._source, self._limits = source, limits or RenderLimits()
        texts, undeclared, has_generation = self._ask('facts')
        self.facts = TemplateFacts(tuple(texts), tuple(undeclared), has_generation)

    def render(self, messages: Sequence[Message], **options: Any) -> Rendered:
        """See JinjaTemplate. Also raises ChatError if the template exceeds the limits."""
        return _rendered(self._ask('render', list(messages), options))

    def render_with_spans(self, messages: Sequence[Message], **options: Any) -> Rendered:
        """See JinjaTemplate. Also raises ChatError if the template exceeds the limits."""
        return _rendered(self._ask('render_with_spans', list(messages), options))

    def end_of_turn(self, special: Sequence[str]) -> str:
        """See JinjaTemplate. Also raises ChatError if the template exceeds the limits."""
        return str(self._ask('end_of_turn', list(special)))

    def _ask(self, *request: Any) -> Any:
        return _renderer(os.getpid(), self._limits).ask(self._source, request)


def main(limits: str) -> None:
    """Serves requests on stdin and stdout until stdin is closed. The kernel kills the process at its limits.

    Args:
        limits: RenderLimits as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent process may ignore or block this signal, and a new process inherits that.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGXCPU})
    template = functools.lru_cache(_KEPT)(JinjaTemplate)
    given = RenderLimits(*json.loads(limits))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            source, request = _read(requests).decode('utf-8', 'surrogatepass'), _read(requests)
            _limit(resource.RLIMIT_AS, given.memory_bytes + given.memory_per_byte * len(request))
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + given.cpu_seconds))
            try:
                longest = given.output_bytes + given.output_per_byte * len(request)
                answer = json.dumps(['value', _answer(template(source), json.loads(request), longest)])
            except ChatError as error:
                answer = json.dumps(['error', str(error)])
            except Exception as error:
                answer = json.dumps(['error', f'the chat template fails: {type(error).__name__}'])
            _write(answers, answer.encode())


class _Renderer:
    """Handle of the rendering process, which starts at the first request and restarts after it was killed."""

    def __init__(self, owner: int, limits: RenderLimits):
        self._owner, self._limits = owner, limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._close)

    def ask(self, source: str, request: Sequence[Any]) -> Any:
        """Returns the result of a request. Raises ChatError."""
        try:
            data = json.dumps(request, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatError(f'cannot render a message: {error}') from None
        with self._lock:
            if self._process is None:
                self._process = _start(self._limits)
            requests, answers = self._process.stdin, self._process.stdout
            assert requests is not None
            assert answers is not None
            try:
                _write(requests, source.encode('utf-8', 'surrogatepass'))
                _write(requests, data)
                _wait(answers, self._limits.seconds)
                kind, result = parse_json(_read(answers))
            except TimeoutError:
                self._close()
                raise ChatError(f'the chat template takes more than {self._limits.seconds:g} s') from None
            except (OSError, EOFError, ValueError):
                raise ChatError(self._reason()) from None
            except BaseException:
                # The response would be read as the response to the next request.
                self._close()
                raise
        if kind != 'value':
            raise ChatError(str(result))
        return result

    def _reason(self) -> str:
        """Returns the reason for a missing response, and kills the process."""
        assert self._process is not None
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = 0
        self._close()
        if code == -signal.SIGXCPU:
            return f'the chat template takes more than {self._limits.cpu_seconds:g} s of CPU time'
        return f'the process that renders the chat template stopped with exit code {code}'

    def _close(self) -> None:
        process, self._process = self._process, None
        # A forked copy must not kill the process.
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@functools.lru_cache
def _renderer(process_id: int, limits: RenderLimits) -> _Renderer:
    """Returns the renderer of a process. Forks do not share it."""
    return _Renderer(process_id, limits)


def _plain(value: Any) -> Any:
    """Converts a value that JSON does not support, such as a date, to a dict or text."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _start(limits: RenderLimits) -> subprocess.Popen[bytes]:
    package = str(Path(maxlm.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, *_COMMAND, json.dumps(limits), package, *filter(None, sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
    )


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    # Some systems do not support all limits.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answer(template: JinjaTemplate, request: Sequence[Any], longest: int) -> Any:
    method, *arguments = request
    if method == 'facts':
        return template.facts
    if method == 'end_of_turn':
        return template.end_of_turn(*arguments)
    messages, options = arguments
    rendered = getattr(template, method)(messages, **options)
    if len(rendered.text) > longest:
        raise ChatError(f'the chat template outputs {len(rendered.text)} characters; the limit is {longest}')
    return rendered


def _rendered(result: Sequence[Any]) -> Rendered:
    text, spans, placeholders = result
    return Rendered(text, tuple(Span(*span) for span in spans), placeholders)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _wait(pipe: IO[bytes], seconds: float) -> None:
    """Waits until the pipe is readable or closed. Raises TimeoutError."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if not poll.poll(1000 * seconds):
        raise TimeoutError


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(_LENGTH.size)
    (size,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (0,)
    data = pipe.read(size)
    if len(head) + len(data) < _LENGTH.size + size:
        raise EOFError
    return data
