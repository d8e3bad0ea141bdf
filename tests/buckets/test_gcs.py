"""Storage emulator on loopback, tested with two clients and raw requests."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import fsspec
import pytest

# TensorStore reads its environment once per process.
TENSORSTORE = """
import tensorstore
store = tensorstore.KvStore.open({'driver': 'gcs', 'bucket': 'bucket', 'path': 'run/'}).result()
store.write('a/b', b'one').result()
first = store.read('a/b').result()
assert first.value == b'one'
store.write('a/b', b'two', if_equal=first.stamp.generation).result()
assert store.read('a/b').result().value == b'two'
# The generation is outdated, so nothing is written.
store.write('a/b', b'three', if_equal=first.stamp.generation).result()
store.write('a/c', b'0123456789').result()
from tensorstore import KvStore
print(store.list().result(), store.read('a/b').result().value, store.read('none').result().state)
store.delete_range(KvStore.KeyRange('a/b', 'a/c')).result()
print(store.list().result())
"""


def call(gcs, method, path, body=b'', **headers):
    request = urllib.request.Request(f'{gcs.url}/{path}', data=body or None, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_gcsfs_writes_and_reads(gcs):
    filesystem = fsspec.filesystem('gs', token='anon', use_listings_cache=False, skip_instance_cache=True)
    content = bytes(range(256)) * 3000
    filesystem.pipe_file('bucket/small \u00fc/+?#', b'small')
    filesystem.pipe_file('bucket/large', content, chunksize=2**18)
    with filesystem.open('bucket/streamed', 'wb', block_size=2**18) as file:
        file.write(content)
    assert filesystem.find('bucket') == ['bucket/large', 'bucket/small \u00fc/+?#', 'bucket/streamed']
    assert filesystem.ls('bucket', detail=False) == ['bucket/large', 'bucket/small \u00fc', 'bucket/streamed']
    assert filesystem.cat_file('bucket/small \u00fc/+?#') == b'small'
    assert filesystem.cat_file('bucket/large') == filesystem.cat_file('bucket/streamed') == content
    assert filesystem.cat_file('bucket/large', start=5, end=9) == content[5:9]
    filesystem.rm_file('bucket/large')
    assert not filesystem.exists('bucket/large')
    with pytest.raises(FileExistsError):
        filesystem.pipe_file('bucket/streamed', b'x', mode='create')


def test_tensorstore_writes_and_reads(gcs, monkeypatch):
    """Starts a separate process, which is slow."""
    result = subprocess.run([sys.executable, '-c', TENSORSTORE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[b'a/b', b'a/c'] b'two' missing\n[b'a/c']\n"


def test_generations_and_preconditions(gcs):
    url = 'upload/storage/v1/b/bucket/o?uploadType=media&name=a'
    status, first = call(gcs, 'POST', f'{url}&ifGenerationMatch=0', b'one')
    assert status == 200
    generation = json.loads(first)['generation']
    assert call(gcs, 'POST', f'{url}&ifGenerationMatch=0', b'two')[0] == 412
    assert call(gcs, 'GET', 'storage/v1/b/bucket/o/a?alt=media') == (200, b'one')
    status, second = call(gcs, 'POST', f'{url}&ifGenerationMatch={generation}', b'two')
    assert status == 200
    assert json.loads(second)['generation'] > generation
    assert call(gcs, 'GET', f'storage/v1/b/bucket/o/a?alt=media&generation={generation}')[0] == 404
    assert call(gcs, 'GET', f'storage/v1/b/bucket/o/a?ifGenerationNotMatch={generation}')[0] == 200
    assert call(gcs, 'DELETE', f'storage/v1/b/bucket/o/a?ifGenerationMatch={generation}')[0] == 412
    assert call(gcs, 'DELETE', 'storage/v1/b/bucket/o/a')[0] == 204
    assert call(gcs, 'GET', 'storage/v1/b/bucket/o/a')[0] == 404


@pytest.mark.parametrize(
    ('byte_range', 'status', 'content'),
    [
        ('bytes=2-4', 206, b'234'),
        ('bytes=7-', 206, b'789'),
        ('bytes=8-100', 206, b'89'),
        ('bytes=-3', 206, b'789'),
        ('bytes=10-12', 416, None),
    ],
)
def test_ranges(gcs, byte_range, status, content):
    gcs.put('bucket', 'a', b'0123456789')
    found = call(gcs, 'GET', 'storage/v1/b/bucket/o/a?alt=media', Range=byte_range)
    assert found[0] == status
    assert content is None or found[1] == content


def test_missing_resources(gcs):
    assert call(gcs, 'GET', 'storage/v1/b/nobody')[0] == 404
    assert call(gcs, 'GET', 'storage/v1/b/nobody/o')[0] == 404
    assert call(gcs, 'POST', 'storage/v1/b', b'{"name": "nobody"}')[0] == 200
    assert call(gcs, 'POST', 'storage/v1/b', b'{"name": "nobody"}')[0] == 409
    assert call(gcs, 'GET', 'storage/v1/b/nobody')[0] == 200
    assert call(gcs, 'GET', 'something/else')[0] == 501
