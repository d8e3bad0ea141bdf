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
from maxlm.diagnostics.result import CheckResult, failure, ok, skipped, together, warning

# AWS and Google refuse signatures and tokens that are minutes off; the header itself has whole seconds.
MUCH, LITTLE = 240.0, 10.0
HEADER_SECONDS = 10.0
REMEDY = 'synchronize it: timedatectl set-ntp true, or chronyd'
# adjtimex(2): what it returns when nobody keeps the clock right, and room for its struct on any machine.
TIME_ERROR = 5
TIMEX_BYTES = 512


def check_clock(case: CheckContext) -> CheckResult:
    """Against the run's bucket, if it has one, and by what the kernel knows."""
    findings = []
    endpoints = dict.fromkeys(endpoint_of(url, case.environment) for url in (*case.buckets, *case.data_paths))
    for endpoint in filter(None, endpoints):
        offset = read_offset(endpoint)
        if offset is not None:
            findings.append(evaluate_offset(offset, endpoint))
    synchronized = is_synchronized()
    if synchronized is False:
        findings.append(warning('the kernel says that nobody keeps the clock right', REMEDY))
    elif synchronized:
        findings.append(ok('synchronized'))
    return together(findings) if findings else skipped('neither a bucket nor the kernel tells whether it is right')


def endpoint_of(url: str, environment: Mapping[str, str]) -> str:
    """Where the API of a bucket answers; '' for other places."""
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
        with urllib.request.urlopen(urllib.request.Request(endpoint, method='HEAD'), timeout=HEADER_SECONDS) as answer:
            date = answer.headers.get('Date')
    except urllib.error.HTTPError as error:
        # A refusal has a date too.
        with error:
            date = error.headers.get('Date')
    except (OSError, ValueError):
        # That it cannot be reached is what the check of the bucket says.
        return None
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    # The header was written between the two, and its fraction of a second is cut off.
    return (began + time.time()) / 2 - (theirs + 0.5)


def evaluate_offset(offset: float, endpoint: str) -> CheckResult:
    """The finding of seconds ahead of a server's clock."""
    told = f'{abs(offset):,.0f} s {"ahead of" if offset > 0 else "behind"} {endpoint}'
    if abs(offset) > MUCH:
        return failure(f'{told}: it will refuse requests', REMEDY)
    if abs(offset) > LITTLE:
        return warning(told, REMEDY)
    return ok(f'agrees with {endpoint}')


def is_synchronized() -> bool | None:
    """What the kernel knows of its clock; None where it does not tell."""
    if not sys.platform.startswith('linux'):
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        # All zeros: change nothing, only tell.
        state = libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR
