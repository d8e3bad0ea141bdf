"""The check `clock`: signatures of requests expire, and several machines' logs are read side by side."""

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

# AWS and Google refuse signatures and tokens that are minutes off; the header itself has whole seconds.
MAX_OFFSET, WARN_OFFSET = 240.0, 10.0
HEADER_SECONDS = 10.0
REMEDY = 'synchronize it: timedatectl set-ntp true, or chronyd'
# adjtimex(2): what it returns when nobody keeps the clock right, and room for its struct on any machine.
TIME_ERROR = 5
TIMEX_BYTES = 512


def check_clock(context: CheckContext) -> CheckResult:
    """Against the run's bucket, if it has one, and by what the kernel knows."""
    findings = []
    endpoints = dict.fromkeys(endpoint_of(url, context.environment) for url in (*context.buckets, *context.data_paths))
    for endpoint in filter(None, endpoints):
        offset = read_offset(endpoint)
        if offset is not None:
            findings.append(evaluate_offset(offset, endpoint))
    synchronized = is_synchronized()
    if synchronized is False:
        findings.append(warning('the kernel says that nobody keeps the clock right', REMEDY))
    elif synchronized:
        findings.append(ok('synchronized'))
    return combine(findings) if findings else skipped('neither a bucket nor the kernel tells whether it is right')


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
    """Seconds that this clock is ahead of a server's; None where it does not tell."""
    began = time.time()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(endpoint, method='HEAD'), timeout=HEADER_SECONDS
        ) as response:
            date = response.headers.get('Date')
    except urllib.error.HTTPError as error:
        # A refusal has a date too.
        with error:
            date = error.headers.get('Date')
    except (OSError, ValueError):
        # That it cannot be reached is what the check of the bucket says.
        return None
    try:
        server_time = email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    # The header was written between the two, and its fraction of a second is cut off.
    return (began + time.time()) / 2 - (server_time + 0.5)


def evaluate_offset(offset: float, endpoint: str) -> CheckResult:
    """The finding of seconds ahead of a server's clock."""
    message = f'{abs(offset):,.0f} s {"ahead of" if offset > 0 else "behind"} {endpoint}'
    if abs(offset) > MAX_OFFSET:
        return failure(f'{message}: it will refuse requests', REMEDY)
    if abs(offset) > WARN_OFFSET:
        return warning(message, REMEDY)
    return ok(f'agrees with {endpoint}')


def is_synchronized() -> bool | None:
    """Returns whether the kernel considers its clock synchronized; None where it is not known."""
    if not sys.platform.startswith('linux'):
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        # All zeros: change nothing, only tell.
        state = libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR
