"""Requests to buckets: file systems by URL, bytes and checksums."""

from __future__ import annotations

import base64
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from maxlm.errors import InputError
from maxlm.storage.errors import StorageError, TransientStorageError, classify_error, redact

# What a protocol needs that does not come with maxlm: package and extra.
EXTRAS = {'gs': ('gcsfs', 'gcs'), 'gcs': ('gcsfs', 'gcs'), 's3': ('s3fs', 's3'), 's3a': ('s3fs', 's3')}
# What a connection may be silent for.
SILENCE_SECONDS = 30.0

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Checksum:
    """What tells the content of a file from others.

    Attributes:
        kind: `sha256`, `md5` or `crc32c`; '' where the bucket has none that can be computed here.
        value: in hexadecimal, for crc32c in base64.
        version: changes when the file changes in the bucket; '' where the checksum itself does that.
    """

    kind: str
    value: str
    version: str = ''


def open_filesystem(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, one for all threads of a process, and the path within it.

    Raises:
        StorageError: the protocol is unknown, or a package is missing.
    """
    import fsspec  # takes a while, and readers of what is there do without

    protocol = url.partition('://')[0] if '://' in url else 'file'
    try:
        kind: Any = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package, extra = EXTRAS.get(protocol, ('', ''))
        remedy = f"{package}: pip install 'maxlm[{extra}]'" if package else str(error)
        raise StorageError(f'{redact(url)}: {protocol}:// needs {remedy}') from error
    except ValueError as error:
        raise StorageError(f'{redact(url)}: {protocol}:// is no known protocol; gs:// and s3:// are') from error
    options = kind._get_kwargs_from_urls(url)
    with _opening:
        filesystem = _filesystem(kind, os.getpid(), tuple(sorted(options.items())))
    return filesystem, kind._strip_protocol(url)


def translate_errors(url: str, ask: Callable[[], T]) -> T:
    """Returns the result of `ask`. Errors of storage libraries become those of `classify_error`.

    Raises:
        StorageError: the request failed.
        TransientStorageError: the request failed and may succeed later.
    """
    try:
        return ask()
    except InputError:
        raise
    # They raise what their own libraries raise: there is no common ancestor.
    except Exception as error:
        if isinstance(error, FileNotFoundError):
            _refuse_missing_bucket(url)
        raise classify_error(url, error) from error


def read_file(url: str) -> bytes:
    """Returns the content of a small file.

    Raises:
        StorageError: it cannot be read.
        TransientStorageError: the bucket does not answer.
    """
    filesystem, path = open_filesystem(url)
    return translate_errors(url, functools.partial(read_range, filesystem, path, None, None))


def read_range(filesystem: Any, path: str, start: int | None, end: int | None) -> bytes:
    """Bytes [start, end) of a file; raises what the file system raises."""
    content: bytes = filesystem.cat_file(path, start=start, end=end)
    return content


def read_checksum(filesystem: Any, path: str) -> Checksum:
    """The best that the bucket tells of a file's content; raises what the file system raises."""
    if 's3' in _protocols(filesystem):
        bucket, _, key = path.partition('/')
        facts = filesystem.call_s3('head_object', Bucket=bucket, Key=key)
        etag = facts['ETag'].strip('"')
        # https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html: an MD5 digest, but for objects that were
        # uploaded in parts or are encrypted with keys of KMS or the customer.
        plain = facts.get('ServerSideEncryption', 'AES256') == 'AES256' and 'SSECustomerAlgorithm' not in facts
        return Checksum('md5', etag) if plain and '-' not in etag else Checksum('', '', version=etag)
    facts = filesystem.info(path)
    if facts.get('md5Hash'):
        return Checksum('md5', base64.b64decode(facts['md5Hash']).hex())
    if facts.get('crc32c'):
        return Checksum('crc32c', facts['crc32c'])
    # Names of etags and times in the other file systems of fsspec.
    known = [str(facts[name]) for name in ('ETag', 'etag', 'LastModified', 'last_modified', 'mtime') if facts.get(name)]
    return Checksum('', '', version=f'{facts.get("size")} {" ".join(known)}')


# Threads may ask for the first time together.
_opening = threading.Lock()


@functools.lru_cache
def _filesystem(kind: Any, pid: int, options: tuple[tuple[str, Any], ...]) -> Any:
    # By process: the connections of the asynchronous file systems do not survive a fork. Not fsspec's own instances:
    # it has one for every thread, each with its own connections and credentials.
    del pid
    # gcsfs prints a traceback for every request that it gives up; what is of it for a person is said by alarms.
    logging.getLogger('gcsfs').setLevel(logging.CRITICAL)
    known = dict(options)
    if 'gs' in _protocols(kind):
        import aiohttp  # comes with gcsfs

        # It has none by itself, and would wait for ever where a network is lost without a word.
        known['requests_timeout'] = aiohttp.ClientTimeout(sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
    return kind(**known, use_listings_cache=False, skip_instance_cache=True)


def _protocols(kind: Any) -> tuple[str, ...]:
    return (kind.protocol,) if isinstance(kind.protocol, str) else tuple(kind.protocol)


def _refuse_missing_bucket(url: str) -> None:
    """Raises TransientStorageError if the bucket of `url` is missing: it may come back, unlike a missing file."""
    filesystem, path = open_filesystem(url)
    bucket = path.strip('/').partition('/')[0]
    if url.partition('://')[0] not in EXTRAS:
        return
    try:
        is_there = filesystem.exists(bucket)
    except Exception as error:
        raise classify_error(url, error) from error
    if not is_there:
        raise TransientStorageError(f'{redact(url)}: there is no bucket {bucket}')
