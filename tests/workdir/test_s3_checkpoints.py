"""Orbax's paths at s3://; tests/cli/runs/test_train_s3_nodes.py writes checkpoints into an emulated bucket."""

import importlib

import pytest

from maxlm.errors import InputError
from maxlm.workdir import s3_checkpoints
from maxlm.workdir.run_storage import open_run_storage
from maxlm.workdir.step_dirs import StepDirectory

NAMES = ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL', 'AWS_REGION', 'AWS_DEFAULT_REGION', 'AWS_ACCESS_KEY_ID')


@pytest.mark.parametrize(
    ('environment', 'wanted'),
    [
        ({}, {}),
        ({'AWS_ENDPOINT_URL': 'http://a'}, {'endpoint': 'http://a', 'aws_region': 'us-east-1'}),
        (
            {'AWS_ENDPOINT_URL': 'http://a', 'AWS_ENDPOINT_URL_S3': 'http://b', 'AWS_DEFAULT_REGION': 'eu-1'},
            {'endpoint': 'http://b', 'aws_region': 'eu-1'},
        ),
        ({'AWS_ACCESS_KEY_ID': 'key'}, {'aws_credentials': {'type': 'environment'}}),
    ],
)
def test_tensorstore_gets_the_endpoint_of_the_environment(monkeypatch, environment, wanted):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = s3_checkpoints.s3_kvstore_spec('s3://bucket/run/checkpoints/4')
    assert found == {'driver': 's3', 'bucket': 'bucket', 'path': 'run/checkpoints/4', **wanted}


def test_other_versions_of_orbax_are_refused(monkeypatch):
    arrays = importlib.import_module('orbax.checkpoint._src.serialization.tensorstore_utils')
    monkeypatch.delattr(arrays, '_use_gcs_driver')
    with pytest.raises(InputError, match='this version of Orbax is not supported'):
        s3_checkpoints.enable()


@pytest.mark.parametrize(
    ('url', 'is_shared', 'in_bucket'),
    [
        ('s3://bucket/run', True, False),
        ('s3://bucket/run', False, True),
        ('gs://bucket/run', True, True),
        ('gs://bucket/run', False, True),
    ],
)
def test_processes_without_a_shared_cache_write_to_the_bucket(tmp_path, url, is_shared, in_bucket):
    storage = open_run_storage(url, cache=str(tmp_path), process=1, is_shared=is_shared)
    assert StepDirectory(storage.checkpoint_directory.parent).in_bucket == in_bucket
