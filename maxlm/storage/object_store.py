"""Basic bucket requests: file systems by URL, bytes and checksums."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from maxlm.errors import InputError
from maxlm.installation import pip_install
from maxlm.storage.errors import StorageError, TransientStorageError, classify_error, redact, storage_errors

# Optional package and extra of each protocol.
EXTRAS = {'gs': ('gcsfs', 'gcs'), 'gcs': ('gcsfs', 'gcs'), 's3': ('s3fs', 's3'), 's3a': ('s3fs', 's3')}
# Timeout of a silent connection.
SILENCE_SECONDS = 30.0

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Checksum:
    """Identifies the content of a remote file.

    Attributes:
        kind: `sha256`, `md5` or `crc32c`; '' if the bucket reports no checksum that can be computed locally.
        value: checksum in hexadecimal; in base64 for crc32c.
        version: text that changes with the file in the bucket; '' if the checksum suffices.
    """

    kind: str
    value: str
    version: str = ''


def open_filesystem(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, shared by all threads of a process, and the path within it.

    Raises:
        StorageError: the protocol is unknown, or a package is missing.
    """
    import fsspec  # slow to import, and not needed for local files

    protocol = url.partition('://')[0] if '://' in url else 'file'
    try:
        kind: Any = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package, extra = EXTRAS.get(protocol, ('', ''))
        remedy = f'{package}: {pip_install(extra)}' if package else str(error)
        raise StorageError(f'{redact(url)}: {protocol}:// requires {remedy}') from error
    except ValueError as error:
        raise StorageError(f'{redact(url)}: unknown protocol {protocol}://; use gs:// or s3://') from error
    options = kind._get_kwargs_from_urls(url)
    with _opening:
        filesystem = _filesystem(kind, os.getpid(), tuple(sorted(options.items())))
    return filesystem, kind._strip_protocol(url)


def translate_errors(url: str, request: Callable[[], T]) -> T:
    """Returns the result of `request`. Converts errors of storage libraries with `classify_error`.

    Raises:
        StorageError: the request failed.
        TransientStorageError: the request failed and may succeed later.
    """
    try:
        return request()
    except InputError:
        raise
    # Storage libraries pass on exceptions of their dependencies, which have no common base class.
    except Exception as error:
        if isinstance(error, FileNotFoundError):
            _refuse_missing_bucket(url)
        raise classify_error(url, error) from error


def read_file(url: str) -> bytes:
    """Returns the content of a small file.

    Raises:
        StorageError: the file cannot be read.
        TransientStorageError: the bucket does not respond, or its checksum differs from that of the received bytes.
    """
    filesystem, path = open_filesystem(url)
    return translate_errors(url, functools.partial(read_verified, filesystem, path, url))


def read_verified(filesystem: Any, path: str, url: str) -> bytes:
    """Returns the content of a file whose checksum is that of the bucket. Reads it a second time if they differ.

    Raises:
        TransientStorageError: the checksums differ twice.
        Exception: the errors of the file system.
    """
    for _ in range(2):
        # Other file systems report no checksum, and some servers answer no requests for metadata.
        checksum = read_checksum(filesystem, path) if EXTRAS.keys() & set(_protocols(filesystem)) else Checksum('', '')
        content = read_range(filesystem, path, None, None)
        if digest([content], checksum.kind) == checksum.value:
            return content
    raise TransientStorageError(f'{redact(url)}: its {checksum.kind} differs from that of the received bytes')


def digest(parts: Iterable[bytes], kind: str) -> str:
    """Returns the checksum of the content in parts, in the form of `Checksum.value`."""
    if not kind:
        return ''
    if kind == 'crc32c':
        import google_crc32c  # a dependency of gcsfs

        crc = google_crc32c.Checksum()
        for part in parts:
            crc.update(part)
        return base64.b64encode(crc.digest()).decode()
    known = hashlib.new(kind)
    for part in parts:
        known.update(part)
    return known.hexdigest()


def read_range(filesystem: Any, path: str, start: int | None, end: int | None) -> bytes:
    """Returns bytes [start, end) of a file. Raises the errors of the file system."""
    content: bytes = filesystem.cat_file(path, start=start, end=end)
    return content


def read_checksum(filesystem: Any, path: str) -> Checksum:
    """Returns the best checksum or version that the bucket reports. Raises the errors of the file system."""
    if 's3' in _protocols(filesystem):
        bucket, _, key = path.partition('/')
        response = filesystem.call_s3('head_object', Bucket=bucket, Key=key)
        etag = response['ETag'].strip('"')
        # https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html: the ETag is an MD5 digest, except for
        # multipart uploads and for objects encrypted with KMS or customer keys.
        plain = response.get('ServerSideEncryption', 'AES256') == 'AES256' and 'SSECustomerAlgorithm' not in response
        return Checksum('md5', etag) if plain and '-' not in etag else Checksum('', '', version=etag)
    info = filesystem.info(path)
    if info.get('md5Hash'):
        return Checksum('md5', base64.b64decode(info['md5Hash']).hex())
    if info.get('crc32c'):
        return Checksum('crc32c', info['crc32c'])
    # Names of ETags and times in other file systems of fsspec.
    known = [str(info[name]) for name in ('ETag', 'etag', 'LastModified', 'last_modified', 'mtime') if info.get(name)]
    return Checksum('', '', version=f'{info.get("size")} {" ".join(known)}')


# Serializes concurrent first calls.
_opening = threading.Lock()


@functools.lru_cache
def _filesystem(kind: Any, pid: int, options: tuple[tuple[str, Any], ...]) -> Any:
    # Cached by process, because connections of asynchronous file systems do not survive a fork. fsspec's own instances
    # are not used: each thread gets its own, with separate connections and credentials.
    del pid
    # gcsfs logs a traceback for every failed request. Our own warnings report such failures.
    logging.getLogger('gcsfs').setLevel(logging.CRITICAL)
    known = dict(options)
    # aiohttp ignores the proxies of the environment by default. s3fs and the hub use them.
    if 'http' in _protocols(kind):
        known['client_kwargs'] = {'trust_env': True}
    if 'gs' in _protocols(kind):
        known['session_kwargs'] = {'trust_env': True}
        import aiohttp  # a dependency of gcsfs

        # gcsfs has no default timeout, and would wait forever after a silent loss of the network.
        known['requests_timeout'] = aiohttp.ClientTimeout(sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
    return kind(**known, use_listings_cache=False, skip_instance_cache=True)


def _protocols(kind: Any) -> tuple[str, ...]:
    return (kind.protocol,) if isinstance(kind.protocol, str) else tuple(kind.protocol)


def _refuse_missing_bucket(url: str) -> None:
    """Raises TransientStorageError if the bucket of `url` is missing. Unlike a missing file, it may reappear."""
    filesystem, path = open_filesystem(url)
    bucket = path.strip('/').partition('/')[0]
    if url.partition('://')[0] not in EXTRAS:
        return
    with storage_errors(url):
        exists = filesystem.exists(bucket)
    if not exists:
        raise TransientStorageError(f'{redact(url)}: bucket {bucket} does not exist')
