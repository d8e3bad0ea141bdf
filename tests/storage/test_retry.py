import types

import pytest

from maxlm.errors import InputError
from maxlm.storage.errors import TransientStorageError, classify_error
from maxlm.storage.retry import RetryPolicy

aiohttp = pytest.importorskip('aiohttp', reason='the extra gcs or s3')
multidict = pytest.importorskip('multidict', reason='the extra gcs or s3')
requests = pytest.importorskip('requests', reason='the extra gcs')
botocore_errors = pytest.importorskip('botocore.exceptions', reason='the extra s3')


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


def rate_limited(kind, seconds):
    """Returns an error of a storage library for a response with a Retry-After header."""
    if kind == 'http':
        return aiohttp.ClientResponseError(
            types.SimpleNamespace(real_url='x'), (), status=429, headers=multidict.CIMultiDict({'Retry-After': seconds})
        )
    if kind == 's3':
        headers = {'HTTPStatusCode': 429, 'HTTPHeaders': {'retry-after': seconds}}
        return botocore_errors.ClientError({'Error': {}, 'ResponseMetadata': headers}, 'GetObject')
    response = requests.Response()
    response.status_code, response.headers['Retry-After'] = 429, seconds
    return requests.HTTPError(response=response)


@pytest.mark.parametrize('kind', ['http', 's3', 'requests'])
def test_the_server_determines_the_wait(kind):
    waits = []
    answers = iter(['120', '0', 'Fri, 27 Nov 2026 00:00:00 GMT', '-5', '99999999999'])

    def request():
        if (seconds := next(answers, None)) is None:
            return 'answer'
        try:
            raise rate_limited(kind, seconds)
        except Exception as error:
            raise classify_error('gs://x/a', error) from error

    assert RetryPolicy(print, waits.append).call('gs://x/a', request) == 'answer'
    assert waits == [120, 2, 4, 8, 600]


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
