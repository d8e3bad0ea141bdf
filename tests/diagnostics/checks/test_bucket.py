"""Tests the bucket check on loopback, with each kind of denied request."""

import pytest

from maxlm.diagnostics.checks.bucket import check_bucket, try_bucket
from maxlm.diagnostics.result import CheckStatus
from tests.buckets import s3 as s3_buckets
from tests.diagnostics.machines import CPU, case_on
from tests.gcs_emulator import running
from tests.small import small_config

pytestmark = pytest.mark.network_emulator

URL = 'gs://bucket/runs/one'


@pytest.fixture(scope='module')
def process():
    with running('bucket') as emulator:
        yield emulator


@pytest.fixture
def emulator(process, monkeypatch):
    process.clear()
    process.patch_environment(monkeypatch)
    yield process
    process.clear()


def test_a_permitted_bucket_is_unchanged(emulator):
    found = check_bucket(case_on(CPU, workdir=URL))
    assert found.status is CheckStatus.OK, found
    assert 'can write, list, read and delete' in found.message
    assert emulator.objects == {}


@pytest.mark.parametrize(
    ('match', 'step'),
    [('^POST', 'write'), (r'^GET .*prefix=', 'list'), ('^GET .*alt=media', 'read'), ('^DELETE', 'delete')],
)
def test_denied_operations_are_named(emulator, match, step):
    emulator.fault(match, status=403)
    found = try_bucket(URL)
    assert found.status is CheckStatus.FAILURE
    assert f'{URL}: cannot {step} (' in found.message
    assert 'grant this account' in found.remedy
    emulator.clear()
    # The message names objects that could not be deleted; all other objects are gone.
    left = list(emulator.objects)
    assert len(left) == (step == 'delete')
    assert all(f'gs://{name} was not deleted' in found.message for name in left)
    for name in left:
        from maxlm.storage.bucket import Bucket

        Bucket(f'gs://{name.rpartition("/")[0]}').delete([name.rpartition('/')[2]])


def test_a_missing_bucket(emulator):
    found = try_bucket('gs://elsewhere/run')
    assert found.status is CheckStatus.FAILURE
    assert 'cannot write' in found.message


def test_s3(monkeypatch):
    with s3_buckets.running(monkeypatch) as client:
        # A separate bucket, since objects of other tests stay in the server's memory.
        client.create_bucket(Bucket='doctored')
        config = small_config(checkpoint__remote_dir='s3://doctored/copy')
        assert check_bucket(case_on(CPU, config=config, workdir='runs/x')).status is CheckStatus.OK
        assert client.list_objects_v2(Bucket='doctored')['KeyCount'] == 0
        assert try_bucket('s3://none/run').status is CheckStatus.FAILURE


def test_runs_without_a_bucket_are_skipped():
    assert check_bucket(case_on(CPU, workdir='runs/x')).status is CheckStatus.SKIPPED


def test_an_unknown_protocol_is_reported_without_secrets():
    found = try_bucket('ftq://me:secret@host/x')
    assert found.status is CheckStatus.FAILURE
    assert 'unknown protocol ftq://' in found.message
    assert 'secret' not in found.message
