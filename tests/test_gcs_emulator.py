"""Fault injection of the storage emulator process."""

import http.client
import json
import time
import urllib.error
import urllib.request

import pytest

from tests.gcs_emulator import running

pytestmark = [pytest.mark.multiprocess, pytest.mark.network_emulator]

UPLOAD_PATH = 'upload/storage/v1/b/bucket/o?uploadType=media&name='
# Errors that a broken connection may cause.
BROKEN = (ConnectionError, http.client.HTTPException, urllib.error.URLError)


@pytest.fixture(scope='module')
def process():
    with running('bucket') as emulator:
        yield emulator


@pytest.fixture
def emulator(process):
    process.clear()
    yield process
    process.clear()


def write(emulator, name, content=b'content'):
    """Writes an object and returns the status of the response."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f'{emulator.url}/{UPLOAD_PATH}{name}', content)) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_objects_and_log(emulator):
    assert write(emulator, 'kept') == 200
    assert emulator.objects['bucket/kept'] == len(b'content')
    assert [request for request in emulator.log if request['name'] == 'kept'] == [
        {'method': 'POST', 'kind': 'upload', 'name': 'kept', 'status': 200, 'start': 0, 'stop': 0}
    ]
    assert write(emulator, 'x', b'') == 200
    with pytest.raises(urllib.error.HTTPError, match='404'):
        emulator._call('GET', '_nothing')


@pytest.mark.parametrize('status', [403, 429, 503])
def test_statuses(emulator, status):
    emulator.fault('name=status', times=2, status=status)
    assert [write(emulator, f'status{status}') for _ in range(3)] == [status, status, 200]
    emulator.fault('name=status', status=status)
    assert write(emulator, 'another') == 200
    assert write(emulator, 'status') == status
    emulator.clear()
    assert write(emulator, 'status') == 200


def test_connections_that_break_before_and_after(emulator):
    for when, is_stored in (('before', False), ('after', True)):
        emulator.fault('^POST', times=1, drop=when)
        with pytest.raises(BROKEN):
            write(emulator, when)
        assert (f'bucket/{when}' in emulator.objects) == is_stored
        assert write(emulator, when) == 200


def test_delays(emulator):
    """Asserts a minimum delay, but no maximum."""
    emulator.fault('name=late', times=1, delay=0.2)
    started = time.monotonic()
    assert write(emulator, 'late') == 200
    assert time.monotonic() - started >= 0.2


def test_environment(emulator):
    assert emulator.environment['STORAGE_EMULATOR_HOST'] == emulator.environment['TENSORSTORE_GCS_HTTP_URL']
    assert json.loads(emulator.environment['FSSPEC_GCS'])['use_listings_cache'] is False
