"""How much one request may take, and reading its body within that."""

from __future__ import annotations

import asyncio
import dataclasses

from starlette.requests import Request

from maxlm.errors import InputError, flag
from maxlm.serving.errors import ApiError

JSON = 'application/json'
# Of a body that is too large this many times the limit is still read: a client that is writing does not listen.
_READ_ON = 8
# Limits whose option has another name.
_OPTIONS = {'max_waiting': 'max_queue_size', 'max_body': 'max_request_bytes', 'max_seconds': 'request_timeout'}
_MAY_BE_0 = ('max_tokens', 'max_waiting', 'drain_seconds')


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Of one request, and of all.

    Raises:
        InputError: one is not above 0.
    """

    # Bytes of a body.
    max_body: int = 4 * 2**20
    # Of all bodies that are being read or answered, in bytes.
    max_bodies: int = 256 * 2**20
    # Tokens of a continuation; 0 = what the context leaves.
    max_tokens: int = 0
    # Samples that may wait for a slot, as the engine was told; 0 = as many as come.
    max_waiting: int = 0
    # Requests of one kind that may wait to be tokenized.
    max_encoding: int = 64
    # From the first byte of the request to the last of its answer.
    max_seconds: float = 600.0
    # Until a body is there.
    body_seconds: float = 30.0
    # Between two pieces that a client takes of its answer, and until the head of a request is there.
    stall_seconds: float = 30.0
    # Connections at a time, and those of one address: clients of a proxy share one.
    max_connections: int = 1024
    max_client_connections: int = 256
    # Until the running requests are cut off when the server is told to stop.
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value >= (0 if name in _MAY_BE_0 else 1e-3):
                raise InputError(
                    f'{flag(_OPTIONS.get(name, name))}={value}: must be '
                    f'{"at least" if name in _MAY_BE_0 else "above"} 0'
                )


class Bodies:
    """Reads bodies, and knows how many bytes of them are held."""

    def __init__(self, limits: ServerLimits):
        self._limits = limits
        self.held = 0

    async def read(self, request: Request) -> bytes:
        """The body, counted as held until `release`.

        Raises:
            ApiError: it is too large, too slow, or no JSON by what its head says.
            ClientDisconnect: the client is gone.
        """
        kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
        if kind != JSON:
            raise ApiError(415, f'content-type: must be {JSON}', code='unsupported_media_type')
        if request.headers.get('content-encoding', 'identity').lower() != 'identity':
            raise ApiError(415, 'content-encoding: bodies are not unpacked', code='unsupported_media_type')
        told = request.headers.get('content-length', '0')
        if not (told.isascii() and told.isdigit() and len(told) < 20):
            raise ApiError(400, 'content-length: must be a number', code='invalid_header')
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._read(request, too_long=int(told) > self._limits.max_body)
        except TimeoutError:
            raise ApiError(
                408, f'the body did not come within {self._limits.body_seconds:g} s', headers={'connection': 'close'}
            ) from None

    def release(self, size: int) -> None:
        """A body of so many bytes is not needed any more."""
        self.held -= size

    async def _read(self, request: Request, *, too_long: bool) -> bytes:
        largest = self._limits.max_body
        body, size = bytearray(), 0
        try:
            async for piece in request.stream():
                size += len(piece)
                if too_long or size > largest:
                    too_long = True
                    self.held -= len(body)
                    body.clear()
                    if size > _READ_ON * largest:
                        break
                    continue
                if self.held + len(piece) > self._limits.max_bodies:
                    raise ApiError(
                        429, 'too many large requests at a time', code='overloaded', headers={'retry-after': '5'}
                    )
                self.held += len(piece)
                body += piece
            if too_long:
                raise ApiError(
                    413, f'the body has more than {largest} bytes', code='too_large', headers={'connection': 'close'}
                )
        except BaseException:
            self.held -= len(body)
            raise
        return bytes(body)
