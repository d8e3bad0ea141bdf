"""The security middleware: API key, allowed origins (CORS), request counts, and errors as the API has them."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxlm.log import logger
from maxlm.serving.errors import SERVER, ApiError
from maxlm.serving.metrics import OTHER
from maxlm.serving.service import Service

PAGE, HEALTH, METRICS, MODELS = '/', '/health', '/metrics', '/v1/models'
COMPLETIONS, CHAT = '/v1/completions', '/v1/chat/completions'
PATHS = (PAGE, HEALTH, METRICS, MODELS, COMPLETIONS, CHAT)
COMPLETION_PATHS = (COMPLETIONS, CHAT)
# Readable without a key; the page asks for it itself.
PUBLIC_PATHS = (PAGE, HEALTH)
# Status of nginx for a client that disconnected.
_CLIENT_CLOSED_REQUEST = '499'
_HEADERS = {
    'x-content-type-options': 'nosniff',
    'x-frame-options': 'DENY',
    'referrer-policy': 'no-referrer',
    'cross-origin-resource-policy': 'same-origin',
}


class AccessPolicy:
    """Rules for API key, host and origin of requests.

    A web page open in a browser on this machine can reach what listens on loopback, under its own name if that
    is made to resolve to 127.0.0.1. So a request from a page elsewhere is refused by its Origin, and, of a server on
    loopback, one under another name by its Host.
    """

    def __init__(self, *, api_key: str, loopback: bool, origins: Collection[str]):
        """
        Args:
            api_key: '' = none is required.
            loopback: whether the server listens there alone.
            origins: other origins whose pages may ask, e.g. https://chat.example.org; a proxy has their host.
        """
        self._key = api_key.encode()
        self._loopback, self._origins = loopback, frozenset(origins)
        self._hosts = {'localhost', *(urlsplit(origin).hostname for origin in origins)}

    def check(self, path: str, headers: Headers) -> None:
        """Raises ApiError unless a request may be answered."""
        hosts, origins = headers.getlist('host'), headers.getlist('origin')
        if len(hosts) != 1 or len(origins) > 1 or (self._loopback and not self._is_allowed_host(_hostname(hosts[0]))):
            raise ApiError(
                403,
                'the server does not go by this Host; a name for it is given by --allow-origin=http://NAME',
                code='host_not_allowed',
            )
        if origins and origins[0] not in self._origins and _netloc(origins[0]) != hosts[0].lower():
            raise ApiError(403, 'pages of this Origin may not ask; --allow-origin lets them', code='origin_not_allowed')
        if self._key and path not in PUBLIC_PATHS:
            scheme, _, credentials = headers.get('authorization', '').partition(' ')
            # Compared in a time that does not tell how much of it is right.
            is_valid = hmac.compare_digest(credentials.strip().encode('utf-8', 'surrogateescape'), self._key)
            if not (is_valid and scheme.lower() == 'bearer'):
                raise ApiError(
                    401,
                    'the API key is missing or wrong: Authorization: Bearer KEY',
                    code='invalid_api_key',
                    headers={'www-authenticate': 'Bearer'},
                )

    def _is_allowed_host(self, name: str) -> bool:
        try:
            return name in self._hosts or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


class SecurityMiddleware:
    """Around the app."""

    def __init__(self, app: ASGIApp, service: Service, access: AccessPolicy):
        self._app, self._service, self._access = app, service, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] != 'http':
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        path = scope['path'] if scope['path'] in PATHS else OTHER
        scope.setdefault('state', {})['started'] = started
        status = ''

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message['type'] == 'http.response.start':
                status = str(message['status'])
                message['headers'] = [
                    *message.get('headers', ()),
                    *((name.encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        is_completion = path in COMPLETION_PATHS
        if is_completion:
            self._service.begin_request()
        try:
            self._access.check(scope['path'], Headers(scope=scope))
            if is_completion:
                self._service.check_ready()
            await self._app(scope, receive, send_with_headers)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_headers)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        # Also what is no Exception, such as the panic of a library in Rust.
        except BaseException:
            # Details go to the log only, not to the client.
            logger.exception(f'{scope["method"]} {path} failed')
            if not status:
                await error_response(internal_error())(scope, receive, send_with_headers)
        finally:
            seconds = time.monotonic() - started
            self._service.metrics.requests.labels(path, status or _CLIENT_CLOSED_REQUEST).inc()
            if is_completion:
                self._service.end_request()
                if status == '200':
                    self._service.metrics.request.observe(seconds)
                    self._service.record_duration(seconds)


def internal_error() -> ApiError:
    """Returns the response to an internal error."""
    return ApiError(500, 'the server has a fault; its log has more', kind=SERVER, code='internal_error')


def error_response(error: ApiError) -> JSONResponse:
    """The error as a response."""
    return JSONResponse(error.body, error.status, error.headers)


def _hostname(host: str) -> str:
    """The name in a Host header, without its port; '' where it is none."""
    try:
        return urlsplit(f'//{host}').hostname or ''
    except ValueError:
        return ''


def _netloc(origin: str) -> str:
    """Name and port of an origin, as in a Host header."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ''
