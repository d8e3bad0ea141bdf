"""Sends the response of a completion as one JSON object or as server-sent events (SSE)."""

from __future__ import annotations

import abc
import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from maxlm.inference.engine.requests import Delta
from maxlm.serving.encoding import wait_for_disconnect
from maxlm.serving.responses import ResponseBuilder, usage
from maxlm.serving.schema.errors import ApiError
from maxlm.serving.service import PendingRequest

# Proxies close connections that are idle for about a minute.
KEEPALIVE_SECONDS = 15.0
_KEEPALIVE = b': still here\n\n'
_DONE = b'data: [DONE]\n\n'
_T = TypeVar('_T')
_STREAM_HEADERS = (
    (b'content-type', b'text/event-stream; charset=utf-8'),
    (b'cache-control', b'no-cache'),
    # Disables buffering in nginx.
    (b'x-accel-buffering', b'no'),
)


class EngineResponse(Response, abc.ABC):
    """A response that the engine computes. It ends early if the client disconnects."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response.

        Raises:
            ApiError: the request failed before anything was sent.
        """
        disconnect_task = asyncio.create_task(wait_for_disconnect(receive))
        send_task = asyncio.create_task(self.respond(scope, receive, send))
        try:
            await asyncio.wait({disconnect_task, send_task}, return_when=asyncio.FIRST_COMPLETED)
            if send_task.done():
                send_task.result()
        finally:
            disconnect_task.cancel()
            send_task.cancel()
            self.close()
            await asyncio.gather(disconnect_task, send_task, return_exceptions=True)

    @abc.abstractmethod
    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Computes and sends the response. It is cancelled if the client disconnects."""

    @abc.abstractmethod
    def close(self) -> None:
        """Cancels the requests of the engine that have not finished."""


class CompletionResponse(EngineResponse):
    """Response to a pending completion request."""

    def __init__(self, request: PendingRequest, builder: ResponseBuilder, *, prompt_tokens: int, stream: bool):
        super().__init__()
        self._request, self._builder = request, builder
        self._prompt_tokens, self._stream = prompt_tokens, stream

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_events(send)
        else:
            await self._send_json(scope, receive, send)

    def close(self) -> None:
        self._request.close()

    async def _send_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[list[Delta]] = [[] for _ in range(self._request.num_choices)]
        num_unfinished = len(deltas)
        while num_unfinished:
            for choice, delta in await self._request.next_deltas(KEEPALIVE_SECONDS):
                deltas[choice].append(delta)
                num_unfinished -= delta.finish_reason is not None
        token_usage = usage(self._prompt_tokens, self._request.generated_tokens)
        response = await self._encoded(lambda: JSONResponse(self._builder.response(deltas, token_usage)))
        await response(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        num_unfinished = self._request.num_choices
        await send({'type': 'http.response.start', 'status': 200, 'headers': list(_STREAM_HEADERS)})
        await _send_body(send, b''.join(map(_sse_event, self._builder.first_chunks())))
        try:
            while num_unfinished:
                deltas = await self._request.next_deltas(KEEPALIVE_SECONDS)
                num_unfinished -= sum(delta.finish_reason is not None for _, delta in deltas)
                events = await self._encoded(functools.partial(self._events, deltas))
                await _send_body(send, events if deltas else _KEEPALIVE)
        except ApiError as error:
            await _send_body(send, _sse_event(error.body), more=False)
            return
        if self._builder.with_usage:
            token_usage = usage(self._prompt_tokens, self._request.generated_tokens)
            await _send_body(send, _sse_event(self._builder.usage_chunk(token_usage)))
        await _send_body(send, _DONE, more=False)

    def _events(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        chunks = (self._builder.chunk(choice, delta) for choice, delta in deltas if _has_content(delta))
        return b''.join(map(_sse_event, chunks))

    async def _encoded(self, encode: Callable[[], _T]) -> _T:
        """Returns `encode()`, for large responses from a thread, because other requests must not wait for it."""
        return await asyncio.to_thread(encode) if self._builder.is_large else encode()


def _has_content(delta: Delta) -> bool:
    return bool(delta.text or delta.tokens or delta.finish_reason)


def _sse_event(content: dict[str, Any]) -> bytes:
    return b'data: ' + json.dumps(content, ensure_ascii=False, separators=(',', ':')).encode() + b'\n\n'


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    if body or not more:
        await send({'type': 'http.response.body', 'body': body, 'more_body': more})
