"""Tests the data check with valid, damaged, empty and remote data sets."""

import dataclasses
import shutil

import pytest

from maxlm.data.loader.source import Source
from maxlm.diagnostics.checks.data import check_data
from maxlm.diagnostics.result import CheckStatus
from tests.diagnostics.machines import CPU, case_on
from tests.gcs_emulator import running
from tests.small import small_config


def config_of(path, **keys):
    config = small_config()
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(path), **keys))


def test_a_valid_data_set(dataset):
    found = check_data(case_on(CPU, config=config_of(dataset)))
    assert found.status is CheckStatus.OK, found
    assert f'{dataset}: ' in found.message
    assert 'training tokens in 1 source' in found.message


def test_no_data_set():
    assert check_data(case_on(CPU)).status is CheckStatus.SKIPPED


def test_data_of_the_hub():
    found = check_data(case_on(CPU, config=config_of('hf:org/name')))
    assert (found.status, found.message) == (CheckStatus.SKIPPED, 'hf:org/name is prepared during the run')


def test_a_missing_data_set(tmp_path):
    found = check_data(case_on(CPU, config=config_of(tmp_path / 'none')))
    assert found.status is CheckStatus.FAILURE
    assert 'maxlm prepare' in found.remedy


@pytest.mark.parametrize('damage', ['truncated', 'garbled'])
def test_a_damaged_data_set(dataset, tmp_path, damage):
    copy = shutil.copytree(dataset, tmp_path / 'copy')
    (shard,) = sorted(copy.glob('*train*'))[:1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] if damage == 'truncated' else bytes(len(content)))
    found = check_data(case_on(CPU, config=config_of(copy)))
    assert found.status is CheckStatus.FAILURE
    assert shard.name in found.message


def test_a_data_set_without_training_tokens(dataset, monkeypatch):
    monkeypatch.setattr(Source, 'shards', lambda source, split: [])
    found = check_data(case_on(CPU, config=config_of(dataset)))
    assert found.status is CheckStatus.FAILURE
    assert 'the train split is empty' in found.message


def test_a_data_set_in_a_bucket(dataset, monkeypatch, tmp_path):
    with running('bucket') as emulator:
        emulator.patch_environment(monkeypatch)
        from maxlm.storage.bucket import Bucket

        bucket = Bucket('gs://bucket/data')
        for path in sorted(dataset.iterdir()):
            bucket.put_file(path.name, path, lambda count: None)
        case = case_on(CPU, config=config_of('gs://bucket/data', cache_dir=str(tmp_path / 'cache')))
        found = check_data(case)
        assert found.status is CheckStatus.OK, found
        # The check does not write to the run's cache.
        assert list(tmp_path.iterdir()) == []
        emulator.fault('train', status=403)
        found = check_data(case)
        assert found.status is CheckStatus.FAILURE
        assert 'access denied' in found.message
