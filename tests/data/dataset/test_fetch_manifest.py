"""Tests the download of the manifest and the tokenizer of a remote data set before training starts."""

import hashlib
import json

import pytest

from maxlm.data.dataset import wait
from maxlm.data.dataset.cache_policy import PlannedRead
from maxlm.data.dataset.records import FORMAT_VERSION
from maxlm.data.dataset.shard_cache import Fetcher, fetch_manifest
from maxlm.data.dataset.wait import wait_for_file
from maxlm.errors import InputError
from maxlm.storage.errors import TransientStorageError
from tests.data.dataset.conftest import CONTENTS, SIZE

TOKENIZER = b'{"model": "bytes"}'


def cached(files):
    return [number for number, file in enumerate(files) if file.is_complete]


def put_dataset(gcs, shards=('0', '1'), contents=CONTENTS, tokenizer=TOKENIZER):
    facts = {
        'format_version': FORMAT_VERSION,
        'tokenizer_file': 'tokenizer.json',
        'tokenizer_sha256': hashlib.sha256(tokenizer).hexdigest(),
        'splits': {
            'train': {
                'shards': [
                    {'name': name, 'bytes': SIZE, 'sha256': hashlib.sha256(contents[int(name)]).hexdigest()}
                    for name in shards
                ]
            }
        },
    }
    gcs.put('bucket', 'data/dataset.json', json.dumps(facts).encode())
    gcs.put('bucket', 'data/tokenizer.json', tokenizer)


def test_the_manifest_and_the_tokenizer_are_fetched_first(gcs, tmp_path, warnings, files):
    cache = tmp_path / 'cache'
    put_dataset(gcs)
    manifest = fetch_manifest('gs://bucket/data/', cache, on_warning=warnings.append)
    assert manifest.files(cache) == files[:2]
    assert (cache / 'dataset.json').read_bytes() == gcs.objects['bucket', 'data/dataset.json'].content
    assert (cache / 'tokenizer.json').read_bytes() == TOKENIZER
    assert sorted(path.name for path in cache.iterdir()) == ['dataset.json', 'tokenizer.json']
    gcs.requests.clear()
    assert fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append) == manifest
    assert {request.name.rstrip('/') for request in gcs.requests} == {'data/dataset.json'}
    assert warnings == []


def test_the_chat_template_is_fetched_with_the_tokenizer(gcs, tmp_path, warnings):
    cache, template = tmp_path / 'cache', b'{{ messages }}'
    put_dataset(gcs)
    facts = json.loads(gcs.objects['bucket', 'data/dataset.json'].content)
    facts['chat_template_sha256'] = hashlib.sha256(template).hexdigest()
    gcs.put('bucket', 'data/dataset.json', json.dumps(facts).encode())
    gcs.put('bucket', 'data/chat_template.jinja', b'another')
    with pytest.raises(InputError, match=r'gs://bucket/data/chat_template.jinja does not match its dataset.json'):
        fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    gcs.put('bucket', 'data/chat_template.jinja', template)
    fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    assert (cache / 'chat_template.jinja').read_bytes() == template


def test_without_the_bucket_the_cached_manifest_is_used(gcs, tmp_path, warnings):
    cache = tmp_path / 'cache'
    put_dataset(gcs)
    gcs.vanish()
    with pytest.raises(
        TransientStorageError, match=r'gs://bucket/data/dataset.json: no answer \(Connection refused\)$'
    ):
        fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    gcs.appear()
    manifest = fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    gcs.vanish()
    assert fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append) == manifest
    assert warnings == [f'gs://bucket/data/dataset.json: no answer (Connection refused); using dataset.json in {cache}']
    # A truncated manifest or a changed tokenizer in the cache is not used.
    content = (cache / 'dataset.json').read_bytes()
    (cache / 'dataset.json').write_bytes(content[:50])
    with pytest.raises(TransientStorageError):
        fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    (cache / 'dataset.json').write_bytes(content)
    (cache / 'tokenizer.json').write_bytes(b'{}')
    with pytest.raises(TransientStorageError):
        fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)


def test_another_data_set_does_not_use_cached_files_of_the_first(gcs, tmp_path, warnings, files, monkeypatch):
    monkeypatch.setattr(wait, 'POLL_SECONDS', 0.001)
    cache = tmp_path / 'cache'
    put_dataset(gcs)
    fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    with Fetcher([PlannedRead(tuple(files[:2]), 0, 0)], on_warning=warnings.append):
        wait_for_file(files[0].path)
        wait_for_file(files[1].path)
    # Shard 1 of the second data set has the same name and size but different content.
    put_dataset(gcs, contents=[CONTENTS[0], CONTENTS[7]], tokenizer=b'{"model": "other"}')
    fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    assert cached(files) == [0]
    assert (cache / 'tokenizer.json').read_bytes() == b'{"model": "other"}'


def test_an_unusable_manifest_leaves_no_cache(gcs, tmp_path, warnings):
    cache = tmp_path / 'cache'
    with pytest.raises(InputError, match=r'gs://bucket/data/dataset.json: No such file'):
        fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    put_dataset(gcs)
    gcs.put('bucket', 'data/tokenizer.json', b'{}')
    with pytest.raises(InputError, match=r'gs://bucket/data/tokenizer.json does not match its dataset.json'):
        fetch_manifest('gs://bucket/data', cache, on_warning=warnings.append)
    assert not cache.exists()
