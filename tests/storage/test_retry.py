from __future__ import annotations

import pytest

from maxlm.errors import InputError
from maxlm.storage.errors import TransientStorageError
from maxlm.storage.retry import RetryPolicy


def fails(times, message='a fails'):
    """Returns a request that fails `times` times."""
    left = [times]

    def request():
        left[0] -= 1
        if left[0] >= 0:
            raise TransientStorageError(message)
        return 'answer'

    return request


def test_waits_double_up_to_a_minute_and_warnings_become_rarer():
    warnings, waits = [], []
    retries = RetryPolicy(warnings.append, waits.append)
    assert retries.call('gs://x/a', fails(20)) == 'answer'
    assert waits == [1, 2, 4, 8, 16, 32, *[60] * 14]
    assert warnings == [
        'a fails; failure, retrying in 1 s',
        'a fails; failure 2 in a row, retrying in 2 s',
        'a fails; failure 4 in a row, retrying in 8 s',
        'a fails; failure 8 in a row, retrying in 60 s',
        'a fails; failure 16 in a row, retrying in 60 s',
        'gs://x/a: the bucket responds again',
    ]
    assert retries.call('gs://x/a', fails(0)) == 'answer'
    assert len(warnings) == 6
    retries.call('gs://x/a', fails(1, 'again'))
    assert warnings[6:] == ['again; failure, retrying in 1 s', 'gs://x/a: the bucket responds again']


def test_requests_that_fail_together_warn_once():
    warnings = []
    nested = iter(['gs://x/b', 'gs://x/c'])

    def sleep(seconds):
        # Other threads send requests between two attempts for `a`.
        if url := next(nested, ''):
            retries.call(url, fails(1, f'{url} fails'))

    retries = RetryPolicy(warnings.append, sleep)
    retries.call('gs://x/a', fails(1))
    assert warnings == ['a fails; failure, retrying in 1 s', 'gs://x/a: the bucket responds again']


def test_failed_request_does_not_report_recovery():
    warnings = []
    errors = iter([TransientStorageError('a fails'), InputError('closed')])

    def request():
        raise next(errors)

    with pytest.raises(InputError, match='closed'):
        RetryPolicy(warnings.append, lambda seconds: None).call('gs://x/a', request)
    assert warnings == ['a fails; failure, retrying in 1 s']


def test_retries_stop_after_patience_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr('tenacity.time.monotonic', lambda: clock[0])
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        clock[0] += seconds

    with pytest.raises(TransientStorageError, match='a fails'):
        RetryPolicy(lambda line: None, sleep).call('gs://x/a', fails(100), patience_seconds=100)
    assert waits == [1, 2, 4, 8, 16, 32, 60]
