"""Check `clock`: compares the clock with servers and the kernel's state.

Signatures of requests expire, and logs of several machines are compared by time.
"""

from __future__ import annotations

import ctypes
import email.utils
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, skipped, warning

# AWS and Google reject signatures and tokens that are off by minutes. The header has a resolution of one second.
MAX_OFFSET, WARN_OFFSET = 240.0, 10.0
HEADER_SECONDS = 10.0
REMEDY = 'synchronize the clock: timedatectl set-ntp true, or chronyd'
# Return value of adjtimex(2) for an unsynchronized clock, and a buffer size for its struct on any machine.
TIME_ERROR = 5
TIMEX_BYTES = 512


def check_clock(context: CheckContext) -> CheckResult:
    """Compares the clock with the servers of the run's buckets, and reads the kernel's synchronization state."""
    findings = []
    endpoints = dict.fromkeys(endpoint_of(url, context.environment) for url in (*context.buckets, *context.data_paths))
    for endpoint in filter(None, endpoints):
        offset = read_offset(endpoint)
        if offset is not None:
            findings.append(evaluate_offset(offset, endpoint))
    synchronized = is_synchronized()
    if synchronized is False:
        findings.append(warning('the kernel reports that the clock is not synchronized', REMEDY))
    elif synchronized:
        findings.append(ok('synchronized'))
    return combine(findings) if findings else skipped('no bucket server or kernel state to compare with')


def endpoint_of(url: str, environment: Mapping[str, str]) -> str:
    """Returns the API endpoint of a bucket; '' for other URLs."""
    protocol = url.partition('://')[0] if '://' in url else ''
    if protocol in ('gs', 'gcs'):
        return environment.get('STORAGE_EMULATOR_HOST') or 'https://storage.googleapis.com'
    if protocol in ('s3', 's3a'):
        region = environment.get('AWS_REGION') or environment.get('AWS_DEFAULT_REGION') or 'us-east-1'
        own = environment.get('AWS_ENDPOINT_URL_S3') or environment.get('AWS_ENDPOINT_URL')
        return own or f'https://s3.{region}.amazonaws.com'
    return ''


def read_offset(endpoint: str) -> float | None:
    """Returns the seconds that this clock is ahead of a server's; None if the server reports no time."""
    began = time.time()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(endpoint, method='HEAD'), timeout=HEADER_SECONDS
        ) as response:
            date = response.headers.get('Date')
    except urllib.error.HTTPError as error:
        # An error response has a date too.
        with error:
            date = error.headers.get('Date')
    except (OSError, ValueError):
        # The check `bucket` reports unreachable buckets.
        return None
    try:
        server_time = email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    # The server wrote the header between the two times, and truncated it to seconds.
    return (began + time.time()) / 2 - (server_time + 0.5)


def evaluate_offset(offset: float, endpoint: str) -> CheckResult:
    """Evaluates an offset in seconds ahead of a server's clock."""
    message = f'{abs(offset):,.0f} s {"ahead of" if offset > 0 else "behind"} {endpoint}'
    if abs(offset) > MAX_OFFSET:
        return failure(f'{message}: requests will be rejected', REMEDY)
    if abs(offset) > WARN_OFFSET:
        return warning(message, REMEDY)
    return ok(f'agrees with {endpoint}')


def is_synchronized() -> bool | None:
    """Returns True if the kernel considers its clock synchronized; None if unknown."""
    if not sys.platform.startswith('linux'):
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        # A zeroed struct only reads the state.
        state = libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR
