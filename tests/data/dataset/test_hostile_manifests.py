"""Hostile data sets: no file outside a data set is read, and values that contradict each other are rejected."""

import dataclasses
import json
import os
import shutil

import pytest

from maxlm.config.loading import load
from maxlm.config.schema import DataConfig
from maxlm.data.dataset.preparation import read_progress, stop_reason
from maxlm.data.dataset.records import dataset_fingerprint, load_manifest, save_manifest
from maxlm.data.dataset.remote_manifest import parse_manifest
from maxlm.data.loader.source import open_dataset
from maxlm.data.loader.windows import Sequences
from maxlm.errors import InputError
from maxlm.workdir.files import write_run_files
from tests.shards import write_dataset

TEXTS = ['a first text', 'another text of another length', 'a third']
SHARD = 'train-00000.arrayrecord'
SECRET = '{"token": "secret"}'


@pytest.fixture
def data(tmp_path):
    (tmp_path / 'secret').write_text(SECRET)
    return write_dataset(tmp_path / 'data', [TEXTS, TEXTS[:1]], [TEXTS[1:]]).path


def edit(path, change):
    manifest = path / 'dataset.json'
    facts = json.loads(manifest.read_text())
    change(facts)
    manifest.write_text(json.dumps(facts))


def error_of(read):
    with pytest.raises(InputError) as info:
        read()
    message = str(info.value)
    assert '\n' not in message
    assert 'secret"' not in message
    assert len(message) < 1000
    return message


def move_and_link(path, target):
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.parametrize('name', ['dataset.json', 'tokenizer.json', SHARD, 'validation-00000.arrayrecord'])
def test_a_link_out_of_the_data_set_is_rejected(data, tmp_path, name):
    move_and_link(data / name, tmp_path / 'moved')
    message = error_of(lambda: load_manifest(data))
    assert message.startswith(f'{data / name}: is a link to {tmp_path / "moved"}, outside its directory; ')


@pytest.mark.parametrize(
    'name', ['text_boundaries.json', 'chat_template.jinja', 'tokenizer_config.json', 'special_tokens_map.json']
)
def test_an_unlisted_link_beside_the_tokenizer_is_rejected(data, tmp_path, name):
    (data / name).symlink_to(tmp_path / 'secret')
    assert f'{data / name}: is a link to ' in error_of(lambda: load_manifest(data))


@pytest.mark.parametrize('name', ['tokenizer.json', 'text_boundaries.json', 'chat_template.jinja'])
def test_a_run_copies_no_linked_file(data, tmp_path, name):
    """The link appears after the data set was opened."""
    workdir = tmp_path / 'run'
    workdir.mkdir()
    (data / name).unlink(missing_ok=True)
    (data / name).symlink_to(tmp_path / 'secret')
    assert 'is a link to ' in error_of(lambda: write_run_files(workdir, load('tiny'), data / 'tokenizer.json'))
    assert not any(SECRET in path.read_text() for path in workdir.iterdir())


@pytest.mark.parametrize('kind', ['FIFO', 'a directory', 'a link to /dev/zero', 'a link to '])
def test_special_files_are_rejected_without_blocking(data, in_time, kind):
    make = {
        'FIFO': os.mkfifo,
        'a directory': os.mkdir,
        'a link to /dev/zero': lambda path: path.symlink_to('/dev/zero'),
        'a link to ': lambda path: path.symlink_to(path),
    }[kind]
    for name in ('dataset.json', 'tokenizer.json', SHARD):
        path = data / name
        path.rename(data / 'aside')
        make(path)
        assert kind in error_of(lambda: load_manifest(data))
        path.rmdir() if path.is_dir() else path.unlink()
        (data / 'aside').rename(path)
    assert load_manifest(data).path == data


def test_the_progress_of_a_preparation_is_no_link(data, tmp_path, in_time):
    (tmp_path / 'secret').write_text('{"failure": "secret"}')
    (data / '.preparing.json').symlink_to(tmp_path / 'secret')
    assert read_progress(data) == ''
    assert 'secret' not in stop_reason(data)
    (data / '.preparing.json').unlink()
    os.mkfifo(data / '.preparing.json')
    assert read_progress(data) == ''


def test_links_that_users_have_are_followed(data, tmp_path):
    # A directory on another disk.
    (tmp_path / 'link').symlink_to(data)
    assert len(load_manifest(tmp_path / 'link').splits['train'].shards) == 2
    # Links within the data set, and hard links.
    (data / 'below').mkdir()
    move_and_link(data / SHARD, data / 'below' / 'shard')
    os.link(data / 'tokenizer.json', tmp_path / 'tokenizer.json')
    load_manifest(data)
    # A download of huggingface_hub.
    cache = tmp_path / 'hub' / 'datasets--me--data'
    snapshot, blobs = cache / 'snapshots' / 'c0ffee', cache / 'blobs'
    shutil.copytree(data, snapshot)
    blobs.mkdir()
    for path in [path for path in snapshot.iterdir() if path.is_file()]:
        path.rename(blobs / path.name)
        path.symlink_to(f'../../blobs/{path.name}')
    dataset = load_manifest(snapshot)
    assert len(Sequences(dataset, 'train', 8)[0]['tokens']) > 0
    # A link to the files of another repository.
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to(data / SHARD)
    assert 'outside its directory' in error_of(lambda: load_manifest(snapshot))


BAD_NAMES = [
    '',
    '.',
    '..',
    '../secret',
    '/etc/passwd',
    'below/shard',
    '~/secret',
    'a' * 5000,
    'ü' * 150,
    'a\0b',
    'a\nb',
    '\x1b[31mred',
    '\u202egnp',
    '\ud800',
    '.fetching',
    'dataset.json',
    'tokenizer.json',
    'chat_template.jinja',
    'gs://bucket/shard',
    'file:///etc/passwd',
    'http://169.254.169.254/latest',
    'train-00001.arrayrecord',
    'validation-00000.arrayrecord',
]


@pytest.mark.parametrize('name', BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_names_that_are_no_distinct_files_are_rejected(data, name):
    edit(data, lambda facts: facts['splits']['train']['shards'][0].update(name=name))
    message = error_of(lambda: load_manifest(data))
    assert 'dataset.json is malformed (' in message
    assert message.isprintable()
    with pytest.raises(InputError, match='is malformed'):
        parse_manifest('gs://bucket/data', (data / 'dataset.json').read_bytes())


@pytest.mark.parametrize('name', ['../secret', '.', 'dataset.json', SHARD, 'a' * 5000])
def test_names_of_the_tokenizer_are_checked(data, name):
    edit(data, lambda facts: facts.update(tokenizer_file=name))
    assert 'is malformed' in error_of(lambda: load_manifest(data))
    with pytest.raises(InputError, match='is malformed'):
        parse_manifest('gs://bucket/data', (data / 'dataset.json').read_bytes())


@pytest.mark.parametrize('value', [-1, 10**30, float('nan'), float('inf'), 1.5, '3', None, True, [], {}])
@pytest.mark.parametrize('key', ['tokens', 'documents', 'bytes'])
def test_counts_of_shards_are_checked(data, key, value):
    edit(data, lambda facts: facts['splits']['train']['shards'][0].update({key: value}))
    assert f'is malformed ({key} is ' in error_of(lambda: load_manifest(data))


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (lambda facts: facts['splits']['train'].update(tokens=10), 'train has 10 tokens, but its shards have '),
        (lambda facts: facts['splits']['train'].update(documents=10), 'train has 10 documents, but its shards have 4'),
        (lambda facts: facts['splits']['train']['sources']['texts'].update(tokens=1), "source 'texts' has 1 tokens"),
        (lambda facts: facts['splits']['train'].update(sources={}), "shards of the source 'texts', which it does not"),
        (lambda facts: facts['splits']['train']['shards'].reverse(), 'fingerprint differs'),
        (lambda facts: facts.update(fingerprint=''), 'fingerprint differs'),
        (lambda facts: facts.update(tokenizer_sha256='00'), 'tokenizer.json is damaged: its SHA-256 is '),
        (lambda facts: facts['splits']['train']['shards'][0].update(bytes=1), 'is too large'),
        (lambda facts: facts['splits']['train']['shards'][0].update(bytes=10**9), 'is truncated'),
    ],
)
def test_facts_that_contradict_each_other_are_rejected(data, change, words):
    edit(data, change)
    assert words in error_of(lambda: load_manifest(data))


def test_shards_with_other_numbers_of_records_are_rejected(data):
    def swap(facts):
        shards = facts['splits']['train']['shards']
        shards[0]['tokens'], shards[1]['tokens'] = shards[1]['tokens'], shards[0]['tokens']

    edit(data, swap)
    dataset = load_manifest(data)
    message = error_of(lambda: Sequences(dataset, 'train', 8)[0])
    assert f'{data / SHARD} is damaged: it has ' in message
    assert ' records instead of ' in message


def test_ids_outside_the_vocabulary_are_rejected(data):
    edit(data, lambda facts: facts.update(vocab_size=257))
    dataset = load_manifest(data)
    assert len(Sequences(dataset, 'train', 8)[0]['tokens']) > 0
    edit(data, lambda facts: facts.update(vocab_size=100, end_of_document=99))
    with pytest.raises(InputError, match='fingerprint'):
        load_manifest(data)
    smaller = dataclasses.replace(dataset, vocab_size=100)
    message = error_of(lambda: Sequences(smaller, 'train', 8)[0])
    assert message.startswith(f'{data / SHARD} is damaged: it contains id ')
    assert ', but the vocabulary has 100 ids; ' in message


def test_the_tokenizer_is_that_of_the_tokens(data):
    dataset = load_manifest(data)
    assert dataset.load_tokenizer().vocab_size == dataset.vocab_size
    for field, value in {'vocab_size': 300, 'end_of_document': 97}.items():
        message = error_of(dataclasses.replace(dataset, **{field: value}).load_tokenizer)
        assert f'its {field} is {getattr(dataset, field)}, not {value}; ' in message
    # Readers of tokenizers use this file, which the manifest never lists.
    (data / 'tokenizer_config.json').write_text('{"eos_token": "a"}')
    assert 'its end_of_document is 97, not 256; ' in error_of(load_manifest(data).load_tokenizer)


@pytest.mark.parametrize('name', ['chat_template.jinja', 'text_boundaries.json'])
def test_an_unlisted_file_that_readers_would_use_is_rejected(data, name):
    assert open_dataset(str(data), DataConfig(), print).dataset == load_manifest(data)
    (data / name).write_text('{}')
    assert error_of(lambda: open_dataset(str(data), DataConfig(), print)) == (
        f'{data / name} is not listed in dataset.json; remove it'
    )


def test_many_missing_shards_are_reported_after_one_listing(data, monkeypatch):
    dataset = load_manifest(data)
    train = dataset.splits['train']
    empty = dataclasses.replace(train.shards[0], tokens=0, documents=0)
    missing = tuple(dataclasses.replace(empty, name=f'{number}.arrayrecord') for number in range(3000))
    splits = {**dataset.splits, 'train': dataclasses.replace(train, shards=(*train.shards, *missing))}
    fingerprint = dataset_fingerprint(
        block=dataset.block, dtype=dataset.dtype, end_of_document=dataset.end_of_document, splits=splits
    )
    save_manifest(dataclasses.replace(dataset, splits=splits, fingerprint=fingerprint))
    calls = []
    stat = os.stat
    with monkeypatch.context() as patch:
        patch.setattr(os, 'stat', lambda *args, **kwargs: calls.append(args) or stat(*args, **kwargs))
        message = error_of(lambda: load_manifest(data))
    assert f'{data / "0.arrayrecord"}: No such file or directory (and 2,999 more of 3,003 shards)' in message
    assert len(calls) < 100
