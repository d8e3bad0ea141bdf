"""Errors of storage libraries: classification, messages without secrets, and panics of Rust libraries."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import re
import socket
from collections.abc import Iterator

from maxlm.errors import InputError, os_message

# Timeouts, rate limits and server failures.
TRANSIENT_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
TRANSIENT_ERRNOS = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
# Top-level package and class name, because these packages are optional.
TRANSIENT_ERRORS = frozenset(
    {
        ('aiohttp', 'ClientError'),
        ('botocore', 'ConnectionError'),
        ('botocore', 'HTTPClientError'),
        ('google', 'RefreshError'),
        ('google', 'TransportError'),
        ('httpx', 'TransportError'),
        ('httpx2', 'TransportError'),
        ('requests', 'RequestException'),
    }
)
CREDENTIAL_ERRORS = frozenset(
    {
        ('botocore', 'NoCredentialsError'),
        ('botocore', 'PartialCredentialsError'),
        ('google', 'DefaultCredentialsError'),
    }
)
# TensorStore raises ValueError for every status; https://github.com/abseil/abseil-cpp/blob/master/absl/status/status.h
TRANSIENT_CODES = re.compile(r'UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED')
PERMISSION_CODES = re.compile(r'PERMISSION_DENIED|UNAUTHENTICATED|Forbidden')

# Maximum number of characters of a library's message that become part of ours.
MAX_TEXT = 10_000

_TENSORSTORE_STATUS = re.compile(r"http_response_code='(\d{3})'")
# Passwords may contain `@`.
_USER_IN_URL = re.compile(r"""(?<=://)[^/\s'"]+@""")
# In other URLs, only if it begins with a name, because `?` may be part of file names and globs.
_QUERY_IN_URL = re.compile(
    r"""(?i)(https?://[^\s?'">]*(?=\?)|[a-z][a-z\d+.-]{0,20}://[^\s?'">]*(?=\?[\w.-]+=))(\?[^\s'">]+)"""
)
# Names of secrets. Others contain numbers of tokens, a tokenizer, or the keys of attention, of dicts and of the config.
_NAME = (
    r'[\w-]{0,40}(?:(?<!per_)(?<!first_)token(?!s|iz)|secret|signature|passw|passphrase|pwd|credential|cookie'
    r'|(?:api|access|account|auth|private|sign\w{0,5}|ssh)[_-]?key)[\w-]*'
)
_SECRET = re.compile(
    r'(?i)\b(bearer\s+|authorization["\']?\s*[=:]\s*["\']?\w+\s+|(?<=--)'
    + _NAME
    + r'\s+|(?:sig|auth|pass)=|'
    + _NAME
    + r'["\']?\s*[=:]\s*)(?:"[^"]*"|\'[^\']*\'|\S+)'
)
# Prefixes of tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS, Google, npm, PyPI and Weights & Biases, and of
# JSON Web Tokens.
_TOKEN = re.compile(
    r'\b(hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abprs]-|A[KS]IA|ya29\.|AIza|npm_|pypi-|wandb_v\d_|eyJ)[\w./+-]{12,}'
)
# Webhooks whose path is the secret.
_WEBHOOK = re.compile(
    r"""(https?://(?:hooks\.[\w.-]+|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.-]*webhook\.office\.com|"""
    r"""api\.telegram\.org|[\w.:-]+/hooks)/)[^\s'"]+"""
)
_SECRETS = (
    (_USER_IN_URL, ''),
    (_QUERY_IN_URL, r'\1'),
    (_WEBHOOK, r'\1…'),
    (_TOKEN, r'\1…'),
    (_SECRET, r'\1…'),
)


class StorageError(InputError):
    """A path cannot be listed, opened, read or written. The message is one line that names the path."""


class TransientStorageError(StorageError):
    """A storage failure that may be temporary, such as an outage. The same request may succeed later."""


class RustPanicError(ValueError):
    """A library written in Rust panicked on its input."""


class ErrorKind(enum.Enum):
    """Kind of a storage library's error."""

    TRANSIENT = 'transient'
    PERMISSION = 'permission'
    NOT_FOUND = 'not found'
    OTHER = 'other'


def error_kind(error: BaseException) -> ErrorKind:
    """Returns the kind of an error raised by a storage library. Storage libraries have no common base class."""
    status = http_status(error)
    # The message of an OSError may contain a path with any words.
    text = '' if isinstance(error, OSError) else str(error)
    if isinstance(error, TransientStorageError) or status in TRANSIENT_STATUSES or TRANSIENT_CODES.search(text):
        return ErrorKind.TRANSIENT
    if status in (401, 403) or isinstance(error, PermissionError) or _is_any(error, CREDENTIAL_ERRORS):
        return ErrorKind.PERMISSION
    if status == 404 or isinstance(error, FileNotFoundError):
        return ErrorKind.NOT_FOUND
    # A proxy or a login page has answered instead of the bucket, or the answer is damaged.
    if isinstance(error, json.JSONDecodeError):
        return ErrorKind.TRANSIENT
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or _is_any(error, TRANSIENT_ERRORS):
        return ErrorKind.TRANSIENT
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
        return ErrorKind.TRANSIENT
    return ErrorKind.PERMISSION if PERMISSION_CODES.search(text) else ErrorKind.OTHER


def classify_error(path: str, error: Exception) -> StorageError:
    """Converts an error of a storage library that failed to read `path` into a StorageError.

    Its message is one line without secrets. It is a TransientStorageError if the same request may succeed later. A
    StorageError is returned unchanged.
    """
    if isinstance(error, StorageError):
        return error
    # fsspec reports a server that does not answer as a missing file.
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and not http_status(error):
        error = cause if _is_any(cause, TRANSIENT_ERRORS) else error
    kind = error_kind(error)
    error_class = TransientStorageError if kind is ErrorKind.TRANSIENT else StorageError
    return error_class(f'{redact(path) if "://" in path else path}: {_reason(path, error, kind)}')


@contextlib.contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Context that raises a StorageError for any error; see `classify_error`."""
    try:
        yield
    # Storage libraries pass on exceptions of their dependencies, which have no common base class.
    except Exception as error:
        raise classify_error(path, error) from error


def http_status(error: BaseException) -> int:
    """Returns the HTTP status of an error, or 0 if it has none."""
    for known in (error, error.__cause__):
        response = getattr(known, 'response', None)
        if isinstance(response, dict):
            return int(response.get('ResponseMetadata', {}).get('HTTPStatusCode', 0))
        # aiohttp warns if its attribute `code` is read.
        for owner, name in ((known, 'status'), (known, 'code'), (response, 'status_code')):
            if str(getattr(owner, name, '')).isdigit():
                return int(getattr(owner, name))
    if found := _TENSORSTORE_STATUS.search(str(error)):
        return int(found[1])
    # gcsfs raises an OSError without errno.
    return 403 if str(error).startswith('Forbidden') else 0


def redact(text: str) -> str:
    """Returns `text` without secrets.

    Secrets are user names, passwords and queries in URLs, known forms of tokens and webhooks, and the words after names
    such as `token` or `password`.
    """
    for pattern, public in _SECRETS:
        text = pattern.sub(public, text)
    return text


def short_message(path: str, error: BaseException) -> str:
    """Returns the message of an error about `path` in one short line without secrets, or '' if it has none."""
    return _one_line(path, str(error))


@contextlib.contextmanager
def catch_panics(library: str) -> Iterator[None]:
    """Raises RustPanicError, a subclass of ValueError, if a Rust library panics in the block.

    PyO3 raises `PanicException`, a subclass of BaseException, when Rust code panics. `except Exception` does not catch
    it, and the class cannot be imported.

    Args:
        library: name of the library in the error message.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != 'PanicException':
            raise
        first_line = str(error).partition('\n')[0][:200]
        raise RustPanicError(f'the {library} library panicked: {first_line}') from None


def _is_any(error: BaseException, names: frozenset[tuple[str, str]]) -> bool:
    return any((cls.__module__.partition('.')[0], cls.__name__) in names for cls in type(error).__mro__)


def _reason(path: str, error: Exception, kind: ErrorKind) -> str:
    if isinstance(error, OSError) and error.strerror and '://' not in path:
        return os_message(error)
    status = http_status(error)
    if kind is ErrorKind.TRANSIENT:
        if status in TRANSIENT_STATUSES:
            return f'the server returned status {status}'
        if isinstance(error, json.JSONDecodeError):
            return 'the answer is not JSON; a proxy or login page may have replaced it'
        return f'no answer ({_one_line(path, _system_message(error))})'
    if kind is ErrorKind.NOT_FOUND:
        return os.strerror(errno.ENOENT)
    message = short_message(path, error)
    if kind is ErrorKind.PERMISSION:
        detail = ': '.join(filter(None, [f'status {status}' if status else '', message])) or type(error).__name__
        if status == 401 or _is_any(error, CREDENTIAL_ERRORS):
            return f'no valid credentials ({detail}); log in first'
        return f'access denied ({detail}); check the permissions of these credentials'
    return f'cannot be read ({": ".join(filter(None, [type(error).__name__, message]))})'


def _system_message(error: Exception) -> str:
    """Returns the message of a failed request. Uses the system's text if the error has an errno."""
    # aiohttp keeps the system error of a failed connection. asyncio rewords it and adds addresses.
    system_error = getattr(error, 'os_error', error)
    if isinstance(system_error, OSError):
        number = system_error.errno or 0
        text = os.strerror(number) if number in errno.errorcode else os_message(system_error)
    else:
        text = str(error)
    return text or ('timed out' if isinstance(error, TimeoutError) else type(error).__name__)


def _one_line(path: str, text: str) -> str:
    # The patterns of secrets are slow on long texts.
    line = ' '.join(text[:MAX_TEXT].split())
    # Bucket clients repeat the user and query of a URL elsewhere in their messages.
    for secret in [*_USER_IN_URL.findall(path), *(query for _, query in _QUERY_IN_URL.findall(path))]:
        line = line.replace(secret, '…')
    return redact(line)[:300]
