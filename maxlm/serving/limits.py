"""Limits of requests, and reading of bodies within them."""

from __future__ import annotations

import asyncio
import dataclasses

from starlette.requests import Request

from maxlm.errors import InputError, flag
from maxlm.serving.errors import ApiError

JSON = 'application/json'
# Multiple of the limit that is read and discarded: a client that is writing does not read the response.
_DISCARD_FACTOR = 8
_NON_NEGATIVE = ('max_tokens', 'max_queue_size', 'drain_seconds')


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits of one request and of all.

    Raises:
        InputError: one is not above 0.
    """

    # Bytes of a body.
    max_request_bytes: int = 4 * 2**20
    # Bytes of all bodies in flight.
    max_total_bytes: int = 256 * 2**20
    # Tokens of a continuation; 0 = what the context leaves.
    max_tokens: int = 0
    # Samples that may wait for a slot, as configured in the engine; 0 = as many as come.
    max_queue_size: int = 0
    # Requests of one kind that may wait to be tokenized.
    max_encoding_queue_size: int = 64
    # From the first byte of the request to the last of its response.
    request_timeout: float = 600.0
    # Until a body is there.
    body_seconds: float = 30.0
    # Between two reads of the response by the client, and until the head of a request has arrived.
    stall_seconds: float = 30.0
    # Connections at a time, and those of one address: clients of a proxy share one.
    max_connections: int = 1024
    max_client_connections: int = 256
    # Until the running requests are cut off after the server was asked to stop.
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value >= (0 if name in _NON_NEGATIVE else 1e-3):
                raise InputError(f'{flag(name)}={value}: must be {"at least" if name in _NON_NEGATIVE else "above"} 0')


class BodyReader:
    """Reads bodies and counts their buffered bytes."""

    def __init__(self, limits: ServerLimits):
        self._limits = limits
        self.num_bytes = 0

    async def read(self, request: Request) -> bytes:
        """Returns the body, whose bytes are counted until `release`.

        Raises:
            ApiError: it is too large, too slow, or no JSON by what its head says.
            ClientDisconnect: the client is gone.
        """
        media_type = request.headers.get('content-type', '').partition(';')[0].strip().lower()
        if media_type != JSON:
            raise ApiError(415, f'content-type: must be {JSON}', code='unsupported_media_type')
        if request.headers.get('content-encoding', 'identity').lower() != 'identity':
            raise ApiError(415, 'content-encoding: bodies are not unpacked', code='unsupported_media_type')
        content_length = request.headers.get('content-length', '0')
        if not (content_length.isascii() and content_length.isdigit() and len(content_length) < 20):
            raise ApiError(400, 'content-length: must be a number', code='invalid_header')
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._read(request, is_too_large=int(content_length) > self._limits.max_request_bytes)
        except TimeoutError:
            raise ApiError(
                408, f'the body did not come within {self._limits.body_seconds:g} s', headers={'connection': 'close'}
            ) from None

    def release(self, size: int) -> None:
        """Releases a body of `size` bytes."""
        self.num_bytes -= size

    async def _read(self, request: Request, *, is_too_large: bool) -> bytes:
        limit = self._limits.max_request_bytes
        body, size = bytearray(), 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if is_too_large or size > limit:
                    is_too_large = True
                    self.num_bytes -= len(body)
                    body.clear()
                    if size > _DISCARD_FACTOR * limit:
                        break
                    continue
                if self.num_bytes + len(chunk) > self._limits.max_total_bytes:
                    raise ApiError(
                        429, 'too many large requests at a time', code='overloaded', headers={'retry-after': '5'}
                    )
                self.num_bytes += len(chunk)
                body += chunk
            if is_too_large:
                raise ApiError(
                    413, f'the body has more than {limit} bytes', code='too_large', headers={'connection': 'close'}
                )
        except BaseException:
            self.num_bytes -= len(body)
            raise
        return bytes(body)
