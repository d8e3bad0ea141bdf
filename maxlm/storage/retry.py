"""Retries of requests to buckets: which errors are transient, when to try again, and what to log meanwhile."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections.abc import Callable

from maxlm.errors import InputError, os_message

LONGEST_BACKOFF = 60.0

# Statuses that a later request may not meet: timeouts, too many requests, and all that is the server's own fault.
TRANSIENT_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
TRANSIENT_ERRNOS = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
# By package and name, for none of them need be installed.
TRANSIENT_ERRORS = frozenset(
    {
        ('aiohttp', 'ClientError'),
        ('botocore', 'ConnectionError'),
        ('botocore', 'HTTPClientError'),
        ('google', 'RefreshError'),
        ('google', 'TransportError'),
        ('requests', 'RequestException'),
    }
)

_USER_IN_URL = re.compile(r'(?<=://)[^/@\s]+@')
# Elsewhere `?` is a part of names and globs.
_QUERY_IN_URL = re.compile(r'(https?://[^\s?\'">]*)(\?[^\s\'">]+)')
_SECRET = re.compile(
    r'(?i)\b(bearer\s+|[\w-]*(?:token|secret|signature|password|credential|key)[\w-]*["\']?\s*[=:]\s*)\S+'
)

# Called with one line for a person.
OnWarning = Callable[[str], None]


class TransientStorageError(InputError):
    """A bucket does not answer, or says that it cannot now: the same request may succeed later."""


def backoff_seconds(attempt: int) -> float:
    """Seconds between failure number `attempt` (from 1, in a row) and the next try: 1, 2, 4, … and at most 60."""
    return min(2.0 ** min(attempt - 1, 6), LONGEST_BACKOFF)


def redact(text: str) -> str:
    """Returns `text` without secrets.

    These are user and query of URLs, where passwords and signatures stand, and what follows the name of a key or token.
    """
    return _SECRET.sub(r'\1…', _QUERY_IN_URL.sub(r'\1', _USER_IN_URL.sub('', text)))


def secrets_of(url: str) -> list[str]:
    """Returns user and query of a URL, which clients of buckets repeat in other places of their messages."""
    return [*_USER_IN_URL.findall(url), *(query for _, query in _QUERY_IN_URL.findall(url))]


def classify_error(url: str, error: Exception) -> InputError:
    """What a storage library raised for `url`, in one line; `TransientStorageError` if trying again can help."""
    status = _status(error)
    if status in TRANSIENT_STATUSES:
        return TransientStorageError(f'{redact(url)}: the server answers with status {status}')
    if status == 401:
        return InputError(f'{redact(url)}: no valid credentials (status 401)')
    if status == 403 or isinstance(error, PermissionError):
        return InputError(f'{redact(url)}: access denied (status 403); these credentials may not read it')
    if isinstance(error, FileNotFoundError):
        return InputError(f'{redact(url)}: no such file')
    if _is_transient(error):
        return TransientStorageError(f'{redact(url)}: no answer ({_reason(error)})')
    return InputError(f'{redact(url)}: cannot be read ({_reason(error)})')


class RetryPolicy:
    """Waits between tries, and says so: once for all threads that share a bucket, not once for each of them.

    The first failure raises an alarm, then those whose number is a power of two: at growing intervals. When nothing
    fails any more one line says that too.

    Args:
        on_alarm: is told.
        wait: sleeps for a number of seconds.
    """

    def __init__(self, on_alarm: OnWarning, wait: Callable[[float], object]):
        self._on_alarm = on_alarm
        self._wait = wait
        self._lock = threading.Lock()
        # Failures in a row by URL, and the highest that an alarm was raised for.
        self._failures: dict[str, int] = {}
        self._told = 0

    def failed(self, url: str, error: TransientStorageError) -> None:
        """Returns when the next try is due."""
        with self._lock:
            failures = self._failures[url] = self._failures.get(url, 0) + 1
            seconds = backoff_seconds(failures)
            if failures > self._told and failures.bit_count() == 1:
                self._told = failures
                again = 'failure' if failures == 1 else f'failure {failures} in a row'
                self._on_alarm(f'{error}; {again}, trying again in {seconds:g} s')
        self._wait(seconds)

    def answered(self, url: str) -> None:
        """`url` can be read again."""
        with self._lock:
            if self._drop(url):
                self._on_alarm(f'{redact(url)}: the bucket answers again')

    def forget(self, url: str) -> None:
        """`url` is not wanted any more."""
        with self._lock:
            self._drop(url)

    def _drop(self, url: str) -> bool:
        """Whether it was the last that failed."""
        if self._failures.pop(url, None) is None or self._failures:
            return False
        self._told = 0
        return True


def _status(error: BaseException) -> int:
    """The HTTP status that an error stands for; 0 = none."""
    for known in (error, error.__cause__):
        response = getattr(known, 'response', None)
        if isinstance(response, dict):
            return int(response.get('ResponseMetadata', {}).get('HTTPStatusCode', 0))
        for name in ('code', 'status'):
            if str(getattr(known, name, '')).isdigit():
                return int(getattr(known, name))
    # gcsfs has an OSError without a number for this.
    return 403 if str(error).startswith('Forbidden') else 0


def _is_transient(error: Exception) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
        return True
    return any((cls.__module__.partition('.')[0], cls.__name__) in TRANSIENT_ERRORS for cls in type(error).__mro__)


def _reason(error: Exception) -> str:
    # aiohttp's errors of connecting keep the system's own.
    system_error = getattr(error, 'os_error', error)
    if isinstance(system_error, OSError):
        # asyncio words them in its own way, with addresses.
        number = system_error.errno or 0
        text = os.strerror(number) if number in errno.errorcode else os_message(system_error)
    else:
        text = str(error)
    if not text and isinstance(error, TimeoutError):
        text = 'timed out'
    return redact(' '.join(text.split())[:200]) or type(error).__name__
