"""Sends an answer as one object or as server-sent events (SSE), for as long as the client is connected."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from maxlm.inference.engine.requests import Delta
from maxlm.serving.errors import ApiError
from maxlm.serving.responses import ResponseBuilder, usage
from maxlm.serving.service import PendingRequest

# Proxies take a silent connection for dead after a minute or so.
_BEAT_SECONDS = 15.0
_BEAT = b': still here\n\n'
_DONE = b'data: [DONE]\n\n'
_STREAM_HEADERS = (
    (b'content-type', b'text/event-stream; charset=utf-8'),
    (b'cache-control', b'no-cache'),
    # nginx keeps back what it can otherwise.
    (b'x-accel-buffering', b'no'),
)


class StreamingAnswer(Response):
    """The answer of a question. When the client goes the question is closed."""

    def __init__(
        self, question: PendingRequest, writer: ResponseBuilder, *, prompt_tokens: int, stream: bool, with_usage: bool
    ):
        """`with_usage`: whether a stream ends with a chunk that counts tokens."""
        super().__init__()
        self._question, self._writer = question, writer
        self._prompt_tokens, self._stream, self._with_usage = prompt_tokens, stream, with_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it.

        Raises:
            ApiError: it went wrong before anything was sent.
        """
        gone = asyncio.create_task(_until_gone(receive))
        work = asyncio.create_task(self._send_events(send) if self._stream else self._send_whole(scope, receive, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            gone.cancel()
            work.cancel()
            self._question.close()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[list[Delta]] = [[] for _ in range(self._question.num_choices)]
        left = len(deltas)
        while left:
            for choice, delta in await self._question.batch(_BEAT_SECONDS):
                deltas[choice].append(delta)
                left -= delta.finish is not None
        content = self._writer.whole(deltas, usage(self._prompt_tokens, self._question.drawn_tokens))
        await JSONResponse(content)(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        left = self._question.num_choices
        await send({'type': 'http.response.start', 'status': 200, 'headers': list(_STREAM_HEADERS)})
        await _send(send, b''.join(map(_event, self._writer.first())))
        try:
            while left:
                found = await self._question.batch(_BEAT_SECONDS)
                left -= sum(delta.finish is not None for _, delta in found)
                chunks = [self._writer.chunk(choice, delta) for choice, delta in found if _is_told(delta)]
                await _send(send, b''.join(map(_event, chunks)) if found else _BEAT)
        except ApiError as error:
            await _send(send, _event(error.body), more=False)
            return
        if self._with_usage:
            counted = usage(self._prompt_tokens, self._question.drawn_tokens)
            await _send(send, _event(self._writer.usage_chunk(counted)))
        await _send(send, _DONE, more=False)


def _is_told(delta: Delta) -> bool:
    return bool(delta.text or delta.tokens or delta.finish)


def _event(content: dict[str, Any]) -> bytes:
    return b'data: ' + json.dumps(content, ensure_ascii=False, separators=(',', ':')).encode() + b'\n\n'


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    if body or not more:
        await send({'type': 'http.response.body', 'body': body, 'more_body': more})


async def _until_gone(receive: Receive) -> None:
    while (await receive())['type'] != 'http.disconnect':
        pass
