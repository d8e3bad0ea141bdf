from __future__ import annotations

import errno

import pytest

from maxlm.errors import InputError
from maxlm.storage.retry import RetryPolicy, TransientStorageError, backoff_seconds, classify_error, redact

aiohttp = pytest.importorskip('aiohttp', reason='the extra gcs or s3')
requests = pytest.importorskip('requests', reason='the extra gcs')
botocore_errors = pytest.importorskip('botocore.exceptions', reason='the extra s3')
gcsfs_errors = pytest.importorskip('gcsfs.retry', reason='the extra gcs')
google_errors = pytest.importorskip('google.auth.exceptions', reason='the extra gcs')


def test_backoff_doubles_up_to_a_minute():
    assert [backoff_seconds(attempt) for attempt in range(1, 10)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert backoff_seconds(10**6) == 60


def s3_error(status):
    response = {'Error': {'Code': str(status)}, 'ResponseMetadata': {'HTTPStatusCode': status}}
    return botocore_errors.ClientError(response, 'GetObject')


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    'error',
    [
        ConnectionResetError(errno.ECONNRESET, 'reset'),
        TimeoutError(),
        OSError(errno.EHOSTUNREACH, 'no route'),
        aiohttp.ClientPayloadError('not completed'),
        requests.exceptions.ProxyError(),
        google_errors.TransportError('x'),
        botocore_errors.EndpointConnectionError(endpoint_url='http://127.0.0.1'),
        botocore_errors.ReadTimeoutError(endpoint_url='http://127.0.0.1'),
        gcsfs_errors.HttpError({'code': 503, 'message': 'busy'}),
        gcsfs_errors.HttpError({'code': '429', 'message': 'slow down'}),
        s3_error(500),
        caused(OSError(errno.EBUSY, 'slow down'), s3_error(503)),
    ],
    ids=repr,
)
def test_what_may_pass_is_told_apart(error):
    found = classify_error('gs://b/x', error)
    assert isinstance(found, TransientStorageError)
    assert str(found).startswith('gs://b/x: ')


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (FileNotFoundError('b/x'), 'no such file'),
        (PermissionError('no'), 'access denied'),
        (caused(PermissionError('no'), s3_error(403)), 'access denied'),
        (OSError('Forbidden: b/x\nno'), 'access denied'),
        (gcsfs_errors.HttpError({'code': 401, 'message': 'no'}), 'no valid credentials'),
        (botocore_errors.NoCredentialsError(), 'Unable to locate credentials'),
        (gcsfs_errors.HttpError({'code': 416, 'message': 'no such range'}), 'no such range'),
        (ValueError('of a\nlibrary'), 'of a library'),
    ],
    ids=repr,
)
def test_what_stays_wrong_is_told_apart(error, message):
    found = classify_error('gs://b/x', error)
    assert isinstance(found, InputError)
    assert not isinstance(found, TransientStorageError)
    assert message in str(found)
    assert '\n' not in str(found)


def test_nothing_secret_is_told():
    assert redact('https://user:secret@host/a/b?sig=secret&x=1 failed') == 'https://host/a/b failed'
    assert redact("ftp://me:secret@host/a 'http://h/p?token=secret'") == "ftp://host/a 'http://h/p'"
    assert redact('gs://bucket/what?.txt') == 'gs://bucket/what?.txt'
    found = classify_error('https://u:secret@h/x?k=secret', RuntimeError('GET https://u:secret@h/x?k=secret'))
    assert str(found) == 'https://h/x: cannot be read (GET https://h/x)'


def test_alarms_are_raised_once_for_all_files_and_then_ever_more_rarely():
    alarms, waits = [], []
    outage = RetryPolicy(alarms.append, waits.append)
    for attempt in range(1, 21):
        for name in 'abc':
            outage.failed(f'gs://x/{name}', TransientStorageError(f'{name} fails'))
        assert waits[-3:] == [backoff_seconds(attempt)] * 3
    assert alarms == [
        'a fails; failure, trying again in 1 s',
        'a fails; failure 2 in a row, trying again in 2 s',
        'a fails; failure 4 in a row, trying again in 8 s',
        'a fails; failure 8 in a row, trying again in 60 s',
        'a fails; failure 16 in a row, trying again in 60 s',
    ]
    del alarms[:]
    outage.answered('gs://x/a')
    outage.answered('gs://x/other')
    outage.answered('gs://x/b')
    assert alarms == []
    outage.answered('gs://x/c')
    assert alarms == ['gs://x/c: the bucket answers again']
    outage.answered('gs://x/c')
    outage.failed('gs://x/a', TransientStorageError('again'))
    assert alarms[1:] == ['again; failure, trying again in 1 s']
    outage.forget('gs://x/a')
    assert len(alarms) == 2
