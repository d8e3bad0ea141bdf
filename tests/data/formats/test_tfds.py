from __future__ import annotations

import sys
from typing import ClassVar

import pytest

from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import split_file
from maxlm.errors import InputError

NUM_EXAMPLES = 150


@pytest.fixture(scope='module')
def prepare():
    """Returns a function that writes a small data set `tiny/1.0.0` to `data_dir` and returns its directory."""
    import numpy as np
    import tensorflow_datasets as tfds

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version('1.0.0')
        # Nothing is downloaded. Without this attribute, TFDS searches a package for URLs.
        url_infos: ClassVar = {}

        def _info(self):
            features = {'text': tfds.features.Text(), 'id': np.int64, 'meta': {'body': tfds.features.Text()}}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager):
            return {'train': self._generate_examples(NUM_EXAMPLES), 'test': self._generate_examples(3)}

        def _generate_examples(self, count):
            for i in range(count):
                text = f'{i} ü\n' if i % 5 else ''
                yield i, {'text': text, 'id': i, 'meta': {'body': text}}

    def prepare(data_dir, file_format='array_record'):
        builder = Tiny(data_dir=data_dir, file_format=file_format)
        builder.download_and_prepare()
        return str(builder.data_dir)

    tfds.disable_progress_bar()
    # Removes the builder, so that only the files describe the data set.
    tfds.core.registered._DATASET_REGISTRY.pop('tiny', None)
    yield prepare
    tfds.enable_progress_bar()


@pytest.fixture(scope='module')
def data_dir(prepare, tmp_path_factory):
    path = tmp_path_factory.mktemp('tfds')
    prepare(path)
    return path


@pytest.fixture
def directory(data_dir):
    return f'{data_dir}/tiny/1.0.0'


def check_all_documents(documents):
    """Checks that each example with text occurs once, in any order, because TFDS shuffles them."""
    assert {d.text for d in documents} == {f'{i} ü\n' for i in range(NUM_EXAMPLES) if i % 5}
    assert len({d.name for d in documents}) == len(documents)
    assert all(d.text == f'{d.metadata["id"]} ü\n' for d in documents)


def test_nested_features(directory, read, bad_records):
    check_all_documents(read(f'tfds:{directory}', text_key='meta.body', metadata_keys=('id',)))
    ((_, reason),) = bad_records(f'tfds:{directory}', text_key='meta.text')
    assert "no column 'meta.text'; it has id, meta, text, meta.body" in reason


def test_ranges_give_all_documents_without_tensorflow(directory, check_ranges, read):
    loaded = 'tensorflow' in sys.modules
    check_ranges(f'tfds:{directory}', [1, 100, 3000, 2**30], metadata_keys=('id',))
    documents = read(f'tfds:{directory}', metadata_keys=('id',))
    check_all_documents(documents)
    assert all(d.name.startswith('tiny/1.0.0#train:') and d.source == 'tiny' for d in documents)
    assert ('tensorflow' in sys.modules) == loaded


def test_tfrecord_gives_all_documents(tmp_path, prepare, check_ranges, read):
    """Tests TFRecord, which needs TensorFlow (five seconds to import)."""
    directory = prepare(tmp_path, 'tfrecord')
    check_ranges(f'tfds:{directory}', [2000], metadata_keys=('id',))
    check_all_documents(read(f'tfds:{directory}', metadata_keys=('id',)))


@pytest.mark.parametrize('name', ['tiny', 'tiny:1.0.0'])
def test_names_are_looked_up_in_the_data_directory(data_dir, directory, monkeypatch, read, name):
    monkeypatch.setenv('TFDS_DATA_DIR', str(data_dir))
    (by_name,) = find_inputs([f'tfds:{name}#test'])
    (by_directory,) = find_inputs([f'tfds:{directory}#test'])
    assert (by_name.name, by_name.size, by_name.version) == (
        by_directory.name,
        by_directory.size,
        by_directory.version,
    )
    assert {d.text for d in read(f'tfds:{name}#test')} == {'1 ü\n', '2 ü\n'}


def test_the_version_changes_with_the_files(tmp_path, prepare):
    directory = prepare(tmp_path)
    before = find_inputs([f'tfds:{directory}'])
    assert find_inputs([f'tfds:{directory}']) == before
    with open(f'{directory}/tiny-train.array_record-00000-of-00001', 'ab') as file:
        file.write(b'x')
    assert find_inputs([f'tfds:{directory}'])[0].version != before[0].version


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('tfds:no_such_data', r'tfds:no_such_data: Dataset no_such_data not found'),
        ('tfds:tiny:9.9.9', r'tfds:tiny:9\.9\.9: '),
        ('tfds:tiny#nope', r"no split 'nope' in .*; available: train, test"),
        ('tfds:', r'give tfds:NAME'),
        ('tfds:#train', r'give tfds:NAME'),
    ],
)
def test_missing_data_sets_are_named(data_dir, monkeypatch, name, message):
    monkeypatch.setenv('TFDS_DATA_DIR', str(data_dir))
    with pytest.raises(InputError, match=message) as info:
        find_inputs([name])
    assert '\n' not in str(info.value)


def test_a_directory_without_a_data_set_is_named(tmp_path):
    with pytest.raises(InputError, match=rf'^tfds:{tmp_path}: '):
        find_inputs([f'tfds:{tmp_path}'])


def test_missing_features_and_wrong_types_are_named(directory, bad_records):
    ((name, reason),) = bad_records(f'tfds:{directory}', text_key='content')
    assert name == 'tiny/1.0.0#train'
    assert "no column 'content'; it has id, meta, text, meta.body; set --text-field" in reason
    bad = bad_records(f'tfds:{directory}', text_key='id')
    assert len(bad) == NUM_EXAMPLES
    assert 'row 0: contains int, not text' in bad[0][1] or 'row 0: contains int64, not text' in bad[0][1]


def test_damaged_files_are_named(tmp_path, prepare, bad_records):
    directory = prepare(tmp_path)
    path = f'{directory}/tiny-train.array_record-00000-of-00001'
    with open(path, 'r+b') as file:
        file.truncate(100)
    ((name, reason),) = bad_records(f'tfds:{directory}')
    assert name == 'tiny/1.0.0#train'
    assert reason.startswith(f'tfds:{directory}: ')
    (file,) = find_inputs([f'tfds:{directory}'])
    assert len(split_file(file, 1)) == NUM_EXAMPLES
