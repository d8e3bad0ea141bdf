"""Check `bucket`: permission to write, list, read and delete in the run's buckets."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterator

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, skipped
from maxlm.errors import InputError
from maxlm.storage.bucket import Bucket, PermissionDeniedError
from maxlm.storage.errors import TransientStorageError, redact

CONTENT = b'maxlm doctor was here, and should have removed this\n'


def check_bucket(context: CheckContext) -> CheckResult:
    """Tests each of the run's buckets with one small object, which is removed afterwards."""
    if not context.buckets:
        return skipped('neither --workdir nor checkpoint.remote_dir is in a bucket')
    return combine(try_bucket(url) for url in context.buckets)


def try_bucket(url: str) -> CheckResult:
    """Tests one bucket. Only a new object with a random name is touched."""
    name_of_bucket, steps = redact(url), _Steps()
    try:
        bucket = Bucket(url)
    except InputError as error:
        return failure(str(error), 'install the missing package, or fix the URL')
    directory = f'doctor-{secrets.token_hex(8)}'
    name = f'{directory}/object'
    written = False
    try:
        with steps.named('write'):
            bucket.put(name, CONTENT)
        written = True
        with steps.named('list'):
            listed = bucket.list(directory)
        if name not in listed:
            return failure(
                f'{name_of_bucket}: the written object is not listed', 'try again; a run would not find its checkpoints'
            )
        with steps.named('read'):
            content = bucket.read(name)
        if content != CONTENT:
            return failure(
                f'{name_of_bucket}: the object read differs from the object written', 'do not use this bucket'
            )
        with steps.named('delete'):
            bucket.delete([name])
        written = False
        with steps.named('check the deletion'):
            leftover = bucket.list_one(name)
        if leftover is not None:
            return failure(
                f'{name_of_bucket}: the deleted object still exists',
                f'delete {name_of_bucket}/{name}; check retention policies',
            )
    except InputError as error:
        return _refused(
            name_of_bucket,
            steps.current,
            error,
            f'{name_of_bucket}/{name}' if written and steps.current == 'delete' else '',
        )
    finally:
        if written:
            # The deletion may be the request that failed.
            with contextlib.suppress(InputError):
                bucket.delete([name])
    return ok(
        f'{name_of_bucket}: can write, list, read and delete ({steps.seconds * 1000 / steps.count:.0f} ms per request)'
    )


def _refused(name_of_bucket: str, step: str, error: InputError, leftover: str) -> CheckResult:
    also = f'; {leftover} was not deleted' if leftover else ''
    if isinstance(error, PermissionDeniedError):
        remedy = 'log in, or grant this account permission to write, list, read and delete objects in the bucket'
    elif isinstance(error, TransientStorageError):
        remedy = 'check the network connection, and that the bucket exists'
    else:
        remedy = 'fix the URL'
    # The name of the object is random, so it is omitted.
    reason = re.sub(r'^\S+/object: ', '', str(error))
    return failure(f'{name_of_bucket}: cannot {step} ({reason}){also}', remedy)


class _Steps:
    """The current step, and the duration of the requests."""

    def __init__(self) -> None:
        self.current = ''
        self.count = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.current = name
        began = time.perf_counter()
        yield
        self.count += 1
        self.seconds += time.perf_counter() - began
