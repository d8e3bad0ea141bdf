"""Security middleware: API key, allowed hosts and origins, request counts and error responses."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxlm.log import logger
from maxlm.serving.metrics import OTHER
from maxlm.serving.schema.errors import SERVER, ApiError
from maxlm.serving.schema.paths import COMPLETION_PATHS, PATHS, POST_PATHS, PUBLIC_PATHS
from maxlm.serving.service import Service

# Status that nginx uses for a client that disconnected.
_CLIENT_CLOSED_REQUEST = '499'
# A Host header. A more lenient parser may find another name in it than browsers and proxies do.
_HOST = re.compile(r'([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?')
_HEADERS = {
    'x-content-type-options': 'nosniff',
    'x-frame-options': 'DENY',
    'referrer-policy': 'no-referrer',
    'cross-origin-resource-policy': 'same-origin',
}


class AccessPolicy:
    """Rules for API key, host and origin of requests.

    A web page in a local browser can send requests to a loopback address. It can also use its own host name if that
    name is rebound to 127.0.0.1 (DNS rebinding). The Origin check rejects requests from pages of other origins. On a
    loopback address, the Host check rejects other host names.
    """

    def __init__(self, *, api_key: str, loopback: bool, origins: Collection[str]):
        """Initializes the policy.

        Args:
            api_key: required API key; '' = none.
            loopback: True if the server listens on a loopback address only.
            origins: additional allowed origins, such as https://chat.example.org. Their host names are allowed too,
                for requests through a proxy.
        """
        self._key = api_key.encode()
        self._loopback, self._origins = loopback, frozenset(origins)
        self._hosts = {'localhost', *(urlsplit(origin).hostname for origin in origins)}

    def check(self, path: str, headers: Headers) -> None:
        """Raises ApiError if a request is not allowed."""
        hosts, origins = [host.lower() for host in headers.getlist('host')], headers.getlist('origin')
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is None or len(origins) > 1 or (self._loopback and not self._is_allowed_host(found[1].strip('[]'))):
            raise ApiError(
                403,
                'Host header not allowed; add the host name with --allow-origin=http://NAME',
                code='host_not_allowed',
            )
        if origins and origins[0] not in {*self._origins, f'http://{hosts[0]}', f'https://{hosts[0]}'}:
            raise ApiError(403, 'Origin not allowed; add it with --allow-origin', code='origin_not_allowed')
        if self._key and path not in PUBLIC_PATHS:
            scheme, _, credentials = headers.get('authorization', '').partition(' ')
            # Constant-time comparison does not leak how much of the key is correct.
            is_valid = hmac.compare_digest(credentials.strip().encode('utf-8', 'surrogateescape'), self._key)
            if not (is_valid and scheme.lower() == 'bearer'):
                raise ApiError(
                    401,
                    'the API key is missing or invalid; send the header Authorization: Bearer KEY',
                    code='invalid_api_key',
                    headers={'www-authenticate': 'Bearer'},
                )

    def _is_allowed_host(self, name: str) -> bool:
        try:
            return name in self._hosts or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


class SecurityMiddleware:
    """Wraps the app with access checks, security headers, request metrics and error handling."""

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

        is_post = path in POST_PATHS
        if is_post:
            self._service.begin_request()
        try:
            self._access.check(scope['path'], Headers(scope=scope))
            if is_post:
                self._service.check_ready()
            await self._app(scope, receive, send_with_headers)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_headers)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        # Includes exceptions that are not an Exception, such as panics of Rust libraries.
        except BaseException:
            # Details are logged but not sent to the client.
            logger.exception(f'{scope["method"]} {path} failed')
            if not status:
                await error_response(internal_error())(scope, receive, send_with_headers)
        finally:
            seconds = time.monotonic() - started
            self._service.metrics.requests.labels(path, status or _CLIENT_CLOSED_REQUEST).inc()
            if is_post:
                self._service.end_request()
            if path in COMPLETION_PATHS and status == '200':
                self._service.metrics.request.observe(seconds)
                self._service.record_duration(seconds)


def internal_error() -> ApiError:
    """Returns the error for an internal failure."""
    return ApiError(500, 'internal server error; see the server log', kind=SERVER, code='internal_error')


def error_response(error: ApiError) -> JSONResponse:
    """Converts an error to a JSON response."""
    return JSONResponse(error.body, error.status, error.headers)
