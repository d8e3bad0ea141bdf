import json

import numpy as np
import pytest

from maxlm.data.dataset.records import load_manifest, token_dtype, verify
from maxlm.data.dataset.shard_writer import ShardWriter
from maxlm.data.loader.windows import Sequences
from tests.messages import input_error


def edit_manifest(dataset, change):
    path = dataset.path / 'dataset.json'
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def flip_bit(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def test_manifest_round_trip(make_dataset, random_shards):
    dataset = make_dataset(random_shards)
    verify(dataset)
    assert load_manifest(dataset.path) == dataset


def test_the_fingerprint_depends_on_tokens_and_block_size(make_dataset, random_shards):
    first = make_dataset(random_shards).fingerprint
    assert make_dataset(random_shards).fingerprint == first
    random_shards[0][0][0] += 1
    assert make_dataset(random_shards).fingerprint != first
    random_shards[0][0][0] -= 1
    assert make_dataset(random_shards, block=9).fingerprint != first


def test_the_error_for_a_missing_data_set_contains_the_command(tmp_path):
    with input_error(str(tmp_path / 'nothing'), 'maxlm prepare --input', f'--output {tmp_path}'):
        load_manifest(tmp_path / 'nothing')


@pytest.mark.parametrize(
    'content', ['', '{', '[]', '{}', '{"format_version": 1}', '{"format_version": 1, "splits": {"train": 3}}', '\x00']
)
def test_a_malformed_manifest_is_rejected(make_dataset, random_shards, content):
    dataset = make_dataset(random_shards)
    (dataset.path / 'dataset.json').write_text(content)
    with input_error(str(dataset.path / 'dataset.json')):
        load_manifest(dataset.path)


@pytest.mark.parametrize(
    'change',
    [
        lambda facts: facts.update(format_version=99),
        lambda facts: facts.pop('block'),
        lambda facts: facts.update(surprise=1),
        lambda facts: facts.update(block='eight'),
        lambda facts: facts.update(dtype='int7'),
        lambda facts: facts['splits'].pop('validation'),
        lambda facts: facts['splits']['train']['shards'][0].pop('tokens'),
    ],
)
def test_a_manifest_with_an_invalid_key_is_rejected(make_dataset, random_shards, change):
    dataset = make_dataset(random_shards)
    edit_manifest(dataset, change)
    with input_error(str(dataset.path / 'dataset.json')):
        load_manifest(dataset.path)


def test_truncated_and_missing_shards_are_named_with_sizes(make_dataset, random_shards):
    dataset = make_dataset(random_shards)
    path = dataset.path / 'train-00002.arrayrecord'
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with input_error(str(path), str(len(content)), str(len(content) - 100)):
        load_manifest(dataset.path)
    path.unlink()
    with input_error(str(path)):
        load_manifest(dataset.path)


def test_a_flipped_bit_is_detected_by_reading_and_by_verify(make_dataset):
    rng = np.random.default_rng(0)
    dataset = make_dataset([[rng.integers(1, 1000, 5000).tolist()]], block=64)
    path = dataset.path / 'train-00000.arrayrecord'
    flip_bit(path, 5000)  # within the records, which end near byte 10000
    dataset = load_manifest(dataset.path)
    with input_error(str(path)):
        verify(dataset)
    windows = Sequences(dataset, 'train', 64)
    with input_error(str(path), 'damaged'):
        [windows[index] for index in range(len(windows))]


def test_verify_checks_the_tokenizer(make_dataset, random_shards):
    dataset = make_dataset(random_shards)
    flip_bit(dataset.tokenizer_path, 0)
    with input_error('tokenizer.json', 'damaged'):
        verify(dataset)


def test_a_shard_that_is_deleted_while_reading_is_named(make_dataset, random_shards):
    dataset = make_dataset(random_shards)
    (dataset.path / 'train-00000.arrayrecord').unlink()
    with input_error('train-00000.arrayrecord'):
        Sequences(dataset, 'train', 8)[0]


def write_shard(path, tokens):
    with ShardWriter(path, source='texts', block=4, dtype='uint16') as writer:
        writer.write([np.array(tokens)])
        return writer.finish()


def test_a_failed_shard_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match='invalid literal'):
        write_shard(tmp_path / 'train-00000.arrayrecord', [1, 'word'])
    assert list(tmp_path.iterdir()) == []
    write_shard(tmp_path / 'train-00000.arrayrecord', [1, 2])
    assert [path.name for path in tmp_path.iterdir()] == ['train-00000.arrayrecord']


def test_a_shard_that_cannot_be_written_is_named(tmp_path):
    path = tmp_path / 'nowhere' / 'train-00000.arrayrecord'
    with input_error(str(path)):
        write_shard(path, range(10))


def test_dtype_by_vocabulary():
    assert [token_dtype(size) for size in (257, 65536, 65537)] == ['uint16', 'uint16', 'uint32']
