import json

import pytest

from maxlm.data.dataset.records import FORMAT_VERSION
from maxlm.data.dataset.remote_manifest import parse_manifest, remove_stale
from maxlm.errors import InputError
from maxlm.storage.download import RemoteFile

SHARDS = [{'name': 'a', 'bytes': 5, 'sha256': 'x'}, {'name': 'b', 'bytes': 6, 'sha256': 'y'}]
FACTS = {
    'format_version': FORMAT_VERSION,
    'tokenizer_file': 'tokenizer.json',
    'tokenizer_sha256': 't',
    'splits': {'train': {'shards': SHARDS[:1]}, 'validation': {'shards': SHARDS[1:]}},
}


def parse(facts, url='gs://bucket/data'):
    return parse_manifest(url, json.dumps(facts).encode())


def test_the_manifest_of_a_real_data_set_lists_its_files(make_dataset, tmp_path):
    dataset = make_dataset([[[1, 2]], [[3]]], [[[4]]])
    manifest = parse_manifest('gs://bucket/data', (dataset.path / 'dataset.json').read_bytes())
    assert manifest.tokenizer_checksums == {dataset.tokenizer_file: dataset.tokenizer_sha256}
    assert manifest.files(tmp_path / 'cache') == [
        RemoteFile(f'gs://bucket/data/{shard.name}', tmp_path / 'cache' / shard.name, shard.bytes, shard.sha256)
        for split in dataset.splits.values()
        for shard in split.shards
    ]


@pytest.mark.parametrize(
    ('facts', 'reason'),
    [
        ([], 'is malformed'),
        ({}, r"is malformed \('format_version'\)"),
        ({**FACTS, 'format_version': 1}, f'has format 1, but this maxlm reads {FORMAT_VERSION}; prepare it again'),
        ({**FACTS, 'splits': {'train': {}}}, r"is malformed \('shards'\)"),
        ({**FACTS, 'splits': {'train': {'shards': [{**SHARDS[0], 'bytes': 'many'}]}}}, 'is malformed .*many'),
        ({**FACTS, 'splits': {'train': {'shards': [{**SHARDS[0], 'name': '../a'}]}}}, r"a file named '\.\./a'"),
        ({**FACTS, 'splits': {'train': {'shards': [{**SHARDS[0], 'name': ''}]}}}, r"a file named ''"),
        ({**FACTS, 'tokenizer_file': '..'}, r"a file named '\.\.'"),
    ],
)
def test_a_malformed_manifest_is_rejected(facts, reason):
    with pytest.raises(InputError, match=f'^https://host/data/dataset.json .*{reason}'):
        parse(facts, 'https://user:secret@host/data')
    assert parse(FACTS).shards == {'a': (5, 'x'), 'b': (6, 'y')}


def test_stale_shards_are_removed_and_valid_shards_are_kept(tmp_path):
    for name in ('a', 'b', '.b.partial', 'c'):
        (tmp_path / name).touch()
    remove_stale(parse(FACTS), tmp_path)
    (tmp_path / 'dataset.json').write_text(json.dumps(FACTS))
    remove_stale(parse(FACTS), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['.b.partial', 'a', 'b', 'c', 'dataset.json']
    other = [SHARDS[0], {**SHARDS[1], 'sha256': 'z'}, {'name': 'c', 'bytes': 0, 'sha256': ''}]
    remove_stale(parse({**FACTS, 'splits': {'train': {'shards': other}}}), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a', 'c', 'dataset.json']
    # The contents of a data set without readable manifest are unknown.
    (tmp_path / 'dataset.json').write_text('{}')
    remove_stale(parse(FACTS), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['c', 'dataset.json']


def test_a_template_of_the_previous_data_set_is_removed(tmp_path):
    template = {**FACTS, 'chat_template_sha256': 'x'}
    for before in (json.dumps(template), '{}'):
        (tmp_path / 'dataset.json').write_text(before)
        for name in ('tokenizer.json', 'chat_template.jinja'):
            (tmp_path / name).touch()
        remove_stale(parse(template), tmp_path)
        assert (tmp_path / 'chat_template.jinja').exists()
        remove_stale(parse(FACTS), tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ['dataset.json', 'tokenizer.json']
