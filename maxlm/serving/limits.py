"""Server limits, and reading of request bodies within them."""

from __future__ import annotations

import asyncio
import dataclasses

from starlette.requests import Request

from maxlm.errors import InputError, flag
from maxlm.serving.schema.errors import ApiError

JSON = 'application/json'
# Bodies up to this multiple of the limit are read and discarded, because a client does not read while it writes.
_DISCARD_FACTOR = 8
_NON_NEGATIVE = ('max_tokens', 'max_queue_size', 'drain_seconds')


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits of single requests and of the server.

    Attributes:
        max_request_bytes: maximum size of a request body.
        max_total_bytes: maximum total size of the bodies in flight.
        max_tokens: maximum number of tokens of a continuation; 0 = limited by the context only.
        max_queue_size: maximum number of samples waiting for a slot, as configured in the engine; 0 = unlimited.
        max_encoding_queue_size: maximum number of requests waiting in each encoding queue.
        request_timeout: seconds from the first byte of a request to the last byte of its response.
        body_seconds: timeout for reading a body.
        stall_seconds: timeout for a client to read a response, and for the head of a request to arrive.
        max_connections: maximum number of open connections.
        max_client_connections: maximum number of open connections per client address. Clients of a proxy share one.
        drain_seconds: seconds that running requests have to finish during shutdown.

    Raises:
        InputError: a value is out of range.
    """

    max_request_bytes: int = 4 * 2**20
    max_total_bytes: int = 256 * 2**20
    max_tokens: int = 0
    max_queue_size: int = 0
    max_encoding_queue_size: int = 64
    request_timeout: float = 600.0
    body_seconds: float = 30.0
    stall_seconds: float = 30.0
    max_connections: int = 1024
    max_client_connections: int = 256
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value >= (0 if name in _NON_NEGATIVE else 1e-3):
                raise InputError(f'{flag(name)}={value}: must be {"at least" if name in _NON_NEGATIVE else "above"} 0')


class BodyReader:
    """Reads request bodies and limits their total size in memory."""

    def __init__(self, limits: ServerLimits):
        self._limits = limits
        self.num_bytes = 0

    async def read(self, request: Request) -> bytes:
        """Reads and returns a body. Its bytes count toward the total until `release`.

        Raises:
            ApiError: the body is too large, arrives too slowly, or is not declared as uncompressed JSON.
            ClientDisconnect: the client has disconnected.
        """
        media_type = request.headers.get('content-type', '').partition(';')[0].strip().lower()
        if media_type != JSON:
            raise ApiError(415, f'content-type: must be {JSON}', code='unsupported_media_type')
        if request.headers.get('content-encoding', 'identity').lower() != 'identity':
            raise ApiError(415, 'content-encoding: compressed bodies are not supported', code='unsupported_media_type')
        content_length = request.headers.get('content-length', '0')
        if not (content_length.isascii() and content_length.isdigit() and len(content_length) < 20):
            raise ApiError(400, 'content-length: must be a number', code='invalid_header')
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._read(request, is_too_large=int(content_length) > self._limits.max_request_bytes)
        except TimeoutError:
            raise ApiError(
                408,
                f'the request body did not arrive within {self._limits.body_seconds:g} s',
                headers={'connection': 'close'},
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
                        429, 'too many large requests; try again later', code='overloaded', headers={'retry-after': '5'}
                    )
                self.num_bytes += len(chunk)
                body += chunk
            if is_too_large:
                raise ApiError(
                    413,
                    f'the request body has more than {limit} bytes',
                    code='too_large',
                    headers={'connection': 'close'},
                )
        except BaseException:
            self.num_bytes -= len(body)
            raise
        return bytes(body)
