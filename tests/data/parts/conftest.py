"""Inputs of about ten partitions, the files that one command writes, and emulators of buckets."""

import tempfile

import pytest

from maxlm.data.prepare import partitions
from maxlm.workdir import upload_directory
from tests.data.parts.stages import OPTIONS, write_inputs
from tests.preparing import contents, run


@pytest.fixture(autouse=True)
def _machine(monkeypatch, tmp_path):
    """Makes small partitions, does not wait for faulty buckets, and moves the temporary files to a new directory."""
    monkeypatch.setattr(partitions, 'GROUPS', 20)
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 1000)
    monkeypatch.setattr(upload_directory, 'TIMEOUT_SECONDS', 0.0)
    (tmp_path / 'tmp').mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'tmp'))


@pytest.fixture
def inputs(tmp_path):
    """Returns the options that name texts of several formats."""
    return write_inputs(tmp_path / 'inputs')


@pytest.fixture
def expected(inputs, tmp_path):
    """Returns the files that one command writes."""
    assert run(*inputs, *OPTIONS, '--output', tmp_path / 'expected') == 0
    files = contents(tmp_path / 'expected')
    assert len([name for name in files if name.startswith('train-')]) > 6
    return files


@pytest.fixture
def in_bucket(gcs, inputs, tmp_path):
    """Returns the arguments of a preparation in a bucket."""
    return [*inputs, *OPTIONS, '--cache', tmp_path / 'cache', '--output', 'gs://bucket/web']
