"""A process that renders chat templates from elsewhere, within limits of CPU time and memory.

A template can compute for ever in nested loops, or make a text of any length with one operator. A rule about its
operators would not hold for all filters, so the kernel ends the process at its limits.

A request is the source of a template, then JSON: `[method, arguments…]`. It is answered by `['value', result]` or
`['error', line]`, also JSON. A length comes before each of them.
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
from maxlm.data.chat.jinja import ChatError, JinjaTemplate, Rendered, Span, TemplateFacts
from maxlm.data.documents.conversation import Message
from maxlm.storage.json_text import parse_json

_LENGTH = struct.Struct('>Q')
# Neither the environment nor the user's folder; modules come from where this process has them.
_COMMAND = (
    *('-I', '-S', '-c'),
    'import sys; sys.path[:] = sys.argv[2:]; from maxlm.data.chat.template_process import main; main(sys.argv[1])',
)
# Templates that stay compiled.
_KEPT = 8


class RenderLimits(NamedTuple):
    """Limits of one conversation; the sizes grow with it.

    Attributes:
        cpu_seconds: CPU time, which the kernel rounds up to a whole second.
        memory_bytes, memory_per_byte: address space, and what each byte of the conversation adds.
        output_bytes, output_per_byte: characters of the rendered conversation, likewise.
    """

    cpu_seconds: float = 20.0
    memory_bytes: int = 512 << 20
    memory_per_byte: int = 64
    output_bytes: int = 16 << 20
    output_per_byte: int = 16

    @property
    def seconds(self) -> float:
        """Elapsed time after which the process is ended even if it has used little CPU time."""
        return 30 + 5 * self.cpu_seconds


class RemoteTemplate:
    """A template that another process compiles and renders, with the methods of JinjaTemplate.

    Attributes:
        facts: those of it.
    """

    def __init__(self, source: str, limits: RenderLimits | None = None):
        """Raises ChatError when `source` is no template, or is beyond the limits."""
        self._source, self._limits = source, limits or RenderLimits()
        texts, undeclared, has_generation = self._ask('facts')
        self.facts = TemplateFacts(tuple(texts), tuple(undeclared), has_generation)

    def render(self, messages: Sequence[Message], **options: Any) -> Rendered:
        """See JinjaTemplate. Raises ChatError also beyond the limits."""
        return _rendered(self._ask('render', list(messages), options))

    def render_said(self, messages: Sequence[Message], **options: Any) -> Rendered:
        """See JinjaTemplate. Raises ChatError also beyond the limits."""
        return _rendered(self._ask('render_said', list(messages), options))

    def _ask(self, *request: Any) -> Any:
        return _renderer(os.getpid(), self._limits).ask(self._source, request)


def main(limits: str) -> None:
    """Serves requests on the standard streams until the first is closed; the kernel ends it at its limits.

    Args:
        limits: RenderLimits as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent may ignore or block this signal, and a new process inherits that.
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
    """The process, started when it is first asked, and again after it was ended."""

    def __init__(self, owner: int, limits: RenderLimits):
        self._owner, self._limits = owner, limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._close)

    def ask(self, source: str, request: Sequence[Any]) -> Any:
        """The result of a request about a template. Raises ChatError."""
        try:
            data = json.dumps(request, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatError(f'a message cannot be shown: {error}') from None
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
                # Its answer would be read as that to the next request.
                self._close()
                raise
        if kind != 'value':
            raise ChatError(str(result))
        return result

    def _reason(self) -> str:
        """Why there is no answer; the process is ended."""
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
        # A fork of this process must not end it.
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@functools.lru_cache
def _renderer(process_id: int, limits: RenderLimits) -> _Renderer:
    """Returns the renderer of a process; forks do not share it."""
    return _Renderer(process_id, limits)


def _plain(value: Any) -> Any:
    """Returns the text of a value that JSON does not have, such as a date."""
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
    # Not every system has each limit.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answer(template: JinjaTemplate, request: Sequence[Any], longest: int) -> Any:
    method, *arguments = request
    if method == 'facts':
        return template.facts
    messages, options = arguments
    rendered = getattr(template, method)(messages, **options)
    if len(rendered.text) > longest:
        raise ChatError(f'the chat template writes {len(rendered.text)} characters; at most {longest} are taken')
    return rendered


def _rendered(result: Sequence[Any]) -> Rendered:
    text, said, stand_ins = result
    return Rendered(text, tuple(Span(*span) for span in said), stand_ins)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _wait(pipe: IO[bytes], seconds: float) -> None:
    """Waits until there is something to read, or the end of it. Raises TimeoutError."""
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
