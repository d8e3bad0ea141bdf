import base64
import hashlib
import importlib
import multiprocessing
import re
import sys
import threading

import pytest

from maxlm.errors import InputError
from maxlm.installation import pip_install
from maxlm.storage import object_store
from maxlm.storage.errors import TransientStorageError
from maxlm.storage.object_store import Checksum, open_filesystem, read_checksum, read_file, translate_errors


@pytest.fixture
def gcs(gcs):
    gcs.put('bucket', 'a', b'content')
    return gcs


def checksum(url):
    return read_checksum(*open_filesystem(url))


def test_google_cloud_storage_through_the_proxy_of_the_environment(gcs, monkeypatch):
    # The name of the host does not exist, so that only the proxy, which is the emulator, can answer.
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', 'http://storage.invalid')
    object_store._filesystem.cache_clear()
    with pytest.raises(InputError, match='no answer'):
        read_file('gs://bucket/a')
    for name in ('no_proxy', 'NO_PROXY'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('http_proxy', gcs.url)
    object_store._filesystem.cache_clear()
    assert read_file('gs://bucket/a') == b'content'


def test_threads_share_a_file_system(gcs):
    found = []
    threads = [threading.Thread(target=lambda: found.append(open_filesystem('gs://bucket/a')[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
    assert open_filesystem('file:///a')[0] is not found[0]


@pytest.mark.multiprocess
@pytest.mark.filterwarnings('ignore:.*fork:DeprecationWarning', 'ignore:.*fork:RuntimeWarning')
def test_forked_process_has_its_own_file_system(gcs):
    assert read_file('gs://bucket/a') == b'content'
    context = multiprocessing.get_context('fork')
    results = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(read_file('gs://bucket/a')))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert results.get() == b'content'


def test_checksum_from_gcs(gcs):
    md5 = hashlib.md5(b'content').hexdigest()
    assert checksum('gs://bucket/a') == Checksum('md5', md5)
    stored = gcs.put('bucket', 'composed', b'content', composed=True)
    assert checksum('gs://bucket/composed') == Checksum('crc32c', stored.crc32c)
    # https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4: the CRC32C of 32 zero bytes.
    zeros = gcs.put('bucket', 'zeros', bytes(32), composed=True)
    assert base64.b64decode(zeros.crc32c).hex() == '8a9136aa'


def test_checksum_from_s3(s3):
    md5 = hashlib.md5(b'content').hexdigest()
    s3.put_object(Bucket='bucket', Key='plain', Body=b'content')
    assert checksum('s3://bucket/plain') == Checksum('md5', md5)
    s3.put_object(Bucket='bucket', Key='aes', Body=b'content', ServerSideEncryption='AES256')
    assert checksum('s3://bucket/aes') == Checksum('md5', md5)
    # Amazon's ETag of such an object is not an MD5.
    s3.put_object(Bucket='bucket', Key='kms', Body=b'content', ServerSideEncryption='aws:kms')
    assert checksum('s3://bucket/kms').kind == ''
    assert checksum('s3://bucket/kms').version


def test_version_of_local_files(tmp_path):
    (tmp_path / 'a').write_bytes(b'content')
    before = checksum(f'file://{tmp_path}/a')
    assert before.kind == ''
    assert checksum(f'file://{tmp_path}/a') == before
    (tmp_path / 'a').write_bytes(b'contents')
    assert checksum(f'file://{tmp_path}/a') != before


def test_a_missing_extra_and_an_unknown_protocol_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 's3fs', None)
    # Removes the class that an earlier test imported.
    monkeypatch.delitem(importlib.import_module('fsspec.registry')._registry, 's3', raising=False)
    with pytest.raises(InputError, match=re.escape(f's3:// requires s3fs: {pip_install("s3")}')):
        open_filesystem('s3://bucket/x')
    with pytest.raises(InputError, match='unknown protocol nonsense://'):
        open_filesystem('nonsense://bucket/x')


def test_request_without_answer_times_out(gcs, monkeypatch):
    monkeypatch.setattr(object_store, 'SILENCE_SECONDS', 0.05)
    gcs.fault('hold')
    with pytest.raises(TransientStorageError, match=r'^gs://bucket/a: no answer \(timed out\)$'):
        read_file('gs://bucket/a')


def test_library_errors_become_one_line():
    def fail():
        raise RuntimeError('first\nsecond')

    with pytest.raises(InputError, match=r'^gs://bucket/a: cannot be read \(RuntimeError: first second\)$'):
        translate_errors('gs://bucket/a', fail)
    assert translate_errors('gs://bucket/a', lambda: 5) == 5
