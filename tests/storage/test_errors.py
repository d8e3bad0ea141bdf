import errno
import re

import fsspec
import pytest

from maxlm.config.schema import Config
from maxlm.config.serialization import flatten
from maxlm.errors import InputError
from maxlm.storage.errors import (
    ErrorKind,
    RustPanicError,
    StorageError,
    TransientStorageError,
    catch_panics,
    classify_error,
    error_kind,
    redact,
    short_message,
)

aiohttp = pytest.importorskip('aiohttp', reason='the extra gcs or s3')
requests = pytest.importorskip('requests', reason='the extra gcs')
botocore_errors = pytest.importorskip('botocore.exceptions', reason='the extra s3')
gcsfs_errors = pytest.importorskip('gcsfs.retry', reason='the extra gcs')
httpx = pytest.importorskip('httpx', reason='the extra hub')
httpx2 = pytest.importorskip('httpx2', reason='the extra hub')
google_errors = pytest.importorskip('google.auth.exceptions', reason='the extra gcs')

TRANSIENT, PERMISSION, NOT_FOUND, OTHER = ErrorKind


def s3_error(status):
    response = {'Error': {'Code': str(status)}, 'ResponseMetadata': {'HTTPStatusCode': status}}
    return botocore_errors.ClientError(response, 'GetObject')


def caused(error, cause):
    error.__cause__ = cause
    return error


def gcs_error(status, message):
    return gcsfs_errors.HttpError({'code': status, 'message': message})


def tensorstore_error(code, status=None):
    detail = f" [http_response_code='{status}' http_response_body='x']" if status else ''
    return ValueError(f'{code}: Error reading "a/d/0" in "gs://b/x/"{detail}')


def connection_error():
    key = aiohttp.client_reqrep.ConnectionKey('storage.googleapis.com', 443, True, True, None, None, None)
    return aiohttp.ClientConnectorError(key, ConnectionRefusedError(errno.ECONNREFUSED, 'Connect call failed'))


def requests_error(status):
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError('no', response=response)


BUCKET_ERRORS = [
    (ConnectionResetError(errno.ECONNRESET, 'reset'), TRANSIENT, 'no answer (Connection reset by peer)'),
    (TimeoutError('timed out'), TRANSIENT, 'no answer (timed out)'),
    (fsspec.exceptions.FSTimeoutError(), TRANSIENT, 'no answer (timed out)'),
    (OSError(errno.EHOSTUNREACH, 'x'), TRANSIENT, 'no answer (No route to host)'),
    (connection_error(), TRANSIENT, 'no answer (Connection refused)'),
    (aiohttp.ClientPayloadError('not completed'), TRANSIENT, 'no answer (not completed)'),
    (requests.exceptions.ProxyError(), TRANSIENT, 'no answer (ProxyError)'),
    (requests_error(429), TRANSIENT, 'the server returned status 429'),
    (requests_error(403), PERMISSION, 'access denied (status 403: no)'),
    (requests_error(404), NOT_FOUND, 'No such file or directory'),
    (httpx.ConnectError('refused'), TRANSIENT, 'no answer (refused)'),
    (httpx2.ConnectTimeout('timed out'), TRANSIENT, 'no answer (timed out)'),
    (google_errors.TransportError('x'), TRANSIENT, 'no answer (x)'),
    (google_errors.RefreshError('x'), TRANSIENT, 'no answer (x)'),
    (botocore_errors.EndpointConnectionError(endpoint_url='http://h'), TRANSIENT, 'no answer (Could not connect'),
    (botocore_errors.ReadTimeoutError(endpoint_url='http://h'), TRANSIENT, 'no answer (Read timeout on'),
    (gcs_error(503, 'busy'), TRANSIENT, 'the server returned status 503'),
    (gcs_error('429', 'slow down'), TRANSIENT, 'the server returned status 429'),
    (s3_error(500), TRANSIENT, 'the server returned status 500'),
    (caused(OSError(errno.EBUSY, 'slow down'), s3_error(503)), TRANSIENT, 'the server returned status 503'),
    (tensorstore_error('UNAVAILABLE', 503), TRANSIENT, 'the server returned status 503'),
    (tensorstore_error('ABORTED'), TRANSIENT, 'no answer (ABORTED: Error reading'),
    (tensorstore_error('DEADLINE_EXCEEDED'), TRANSIENT, 'no answer (DEADLINE_EXCEEDED: Error reading'),
    (tensorstore_error('RESOURCE_EXHAUSTED', 429), TRANSIENT, 'the server returned status 429'),
    (FileNotFoundError(errno.ENOENT, 'none', 'gs://b/ABORTED'), NOT_FOUND, 'No such file or directory'),
    (PermissionError('Access\n Denied'), PERMISSION, 'access denied (Access Denied); check'),
    (caused(PermissionError('Access Denied'), s3_error(403)), PERMISSION, 'access denied (status 403: Access Denied)'),
    (OSError('Forbidden: b/x\nno'), PERMISSION, 'access denied (status 403: Forbidden: b/x no)'),
    (gcs_error(401, 'no'), PERMISSION, 'no valid credentials (status 401: no, 401); log in first'),
    (botocore_errors.NoCredentialsError(), PERMISSION, 'no valid credentials (Unable to locate credentials); log in'),
    (google_errors.DefaultCredentialsError('none'), PERMISSION, 'no valid credentials (none); log in first'),
    (tensorstore_error('PERMISSION_DENIED', 403), PERMISSION, 'access denied (status 403: PERMISSION_DENIED: Error'),
    (tensorstore_error('UNAUTHENTICATED'), PERMISSION, 'access denied (UNAUTHENTICATED: Error reading'),
    (FileNotFoundError('b/x'), NOT_FOUND, 'No such file or directory'),
    (tensorstore_error('NOT_FOUND', 404), NOT_FOUND, 'No such file or directory'),
    (gcs_error(416, 'no such range'), OTHER, 'cannot be read (HttpError: no such range'),
    (tensorstore_error('DATA_LOSS'), OTHER, 'cannot be read (ValueError: DATA_LOSS: Error reading'),
    (ValueError('of a\nlibrary'), OTHER, 'cannot be read (ValueError: of a library)'),
    (RuntimeError(), OTHER, 'cannot be read (RuntimeError)'),
]


@pytest.mark.parametrize(('error', 'kind', 'message'), BUCKET_ERRORS, ids=[repr(row[0])[:60] for row in BUCKET_ERRORS])
def test_errors_of_buckets(error, kind, message):
    assert error_kind(error) is kind
    found = classify_error('gs://b/x', error)
    assert type(found) is (TransientStorageError if kind is TRANSIENT else StorageError)
    assert str(found).startswith(f'gs://b/x: {message}')
    assert '\n' not in str(found)
    assert classify_error('other', found) is found


@pytest.mark.parametrize(
    ('error', 'kind', 'message'),
    [
        (OSError(errno.EIO, 'Input/output error'), TRANSIENT, 'Input/output error'),
        (PermissionError(errno.EACCES, 'Permission denied'), PERMISSION, 'Permission denied'),
        (FileNotFoundError(errno.ENOENT, 'No such file or directory'), NOT_FOUND, 'No such file or directory'),
        (OSError(errno.ENOSPC, 'No space left on device'), OTHER, 'No space left on device'),
        (ValueError('bad'), OTHER, 'cannot be read (ValueError: bad)'),
    ],
)
def test_errors_of_local_files(error, kind, message):
    assert error_kind(error) is kind
    assert str(classify_error('/a/what?token=x', error)) == f'/a/what?token=x: {message}'


@pytest.mark.parametrize(
    'text',
    [
        's3://bucket/x?sig=SECRET',
        'gs://bucket/x?X-Goog-Signature=SECRET&y=1',
        'HTTPS://host/x?SECRET',
        'wss://host/x?access_token=SECRET',
        'https://ptb.discord.com/api/webhooks/1/SECRET',
        'https://chat.example.org/hooks/SECRET',
        'https://api.telegram.org/bot1:SECRET/sendMessage',
        'npm_0123456789abSECRET and eyJhbGciOiJIUzI1NiJ9.SECRET',
        'passwd=SECRET, pwd: SECRET, Cookie: SECRET',
        'sig=SECRET&auth=SECRET',
        "password='a SECRET'",
        '--token SECRET --api-key SECRET',
        'AccountKey=SECRET;SharedAccessKey=SECRET',
    ],
)
def test_secrets_of_other_forms_are_redacted(text):
    assert 'SECRET' not in redact(text)


@pytest.mark.parametrize(
    'text',
    [
        *(f'{key}={value}' for key, value in flatten(Config()).items()),
        '--max-tokens=5 --tokenizer=bpe:8192',
        'unknown key: data.x; keys: a, b',
        '1,000 tokens: too few; tokenizer.json: missing',
        'gs://bucket/part-?.txt s3://bucket/?=x',
    ],
)
def test_names_of_tokens_and_keys_are_no_secrets(text):
    assert redact(text) == text


def test_long_messages_are_redacted_in_time(in_time):
    for text in ('http://', 'a-', 'x://', 'token="'):
        assert len(short_message('gs://bucket/x', ValueError(text * 10**6))) <= 300


def test_redacted_text():
    assert redact('https://user:secret@host/a/b?sig=secret&x=1 failed') == 'https://host/a/b failed'
    assert redact("ftp://me:secret@host/a 'http://h/p?token=secret'") == "ftp://host/a 'http://h/p'"
    assert redact('gs://bucket/what?.txt') == 'gs://bucket/what?.txt'
    assert redact('hf://datasets/me/data@main/a') == 'hf://datasets/me/data@main/a'
    assert redact('s3://key:se@cret@bucket/a') == 's3://bucket/a'
    assert redact('https://hooks.slack.com/services/T0/B0/secret now') == 'https://hooks.slack.com/… now'
    assert redact('hf_ABCdef1234567890 and sk-proj-1234567890abcdef') == 'hf_… and sk-…'
    assert redact('hf_cache, sk-learn and AKIA') == 'hf_cache, sk-learn and AKIA'
    assert redact("curl -H 'Authorization: Basic bWU6cHc=' -d x") == "curl -H 'Authorization: Basic … -d x"


@pytest.mark.parametrize('error_class', [RuntimeError, ConnectionError, PermissionError, gcsfs_errors.HttpError])
@pytest.mark.parametrize(
    'text',
    [
        'GET https://user:SECRET@host/x?sig=SECRET failed',
        'Authorization: Bearer SECRET was refused',
        'aws_secret_access_key=SECRET is wrong',
        "{'token': 'SECRET'}",
        'X-Amz-Signature=SECRET',
        'invalid bucket "SECRET:SECRET@host"',
        'in /x?token=SECRET',
        'x' * 290 + ' token=SECRET',
    ],
)
def test_no_message_has_a_secret(error_class, text):
    error = error_class({'message': text}) if error_class is gcsfs_errors.HttpError else error_class(text)
    message = str(classify_error('https://SECRET:SECRET@host/x?token=SECRET', error))
    assert 'SECRET' not in message
    assert re.match(r'https://host/x: .* \(.*[a-zA-Z…]', message)


class PanicException(BaseException):
    """Fake of PyO3's class, which cannot be imported."""


def test_a_panic_is_a_value_error():
    with (
        pytest.raises(RustPanicError, match='the tokenizers library panicked: backtrack'),
        catch_panics('tokenizers'),
    ):
        raise PanicException('backtrack\nnote: run with RUST_BACKTRACE=1')


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit, KeyError])
def test_other_errors_pass_through(error):
    with pytest.raises(error), catch_panics('tokenizers'):
        raise error


def test_storage_errors_are_input_errors():
    assert issubclass(StorageError, InputError)
