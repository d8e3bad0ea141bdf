"""Provides buckets on loopback and directories with the layout of a workdir."""

import logging

import pytest

from maxlm.storage.bucket import Bucket
from tests.buckets import gcs as gcs_buckets
from tests.gcs_emulator import FaultyServer


@pytest.fixture
def gcs(monkeypatch):
    with gcs_buckets.running(monkeypatch, FaultyServer) as server:
        server.buckets.add('bucket')
        yield server


@pytest.fixture(params=['gs', 's3'])
def url(request):
    """Returns the URL of a run that does not exist yet, in each kind of bucket."""
    if request.param == 'gs':
        request.getfixturevalue('gcs')
        return 'gs://bucket/runs/one'
    request.getfixturevalue('s3')
    return 's3://bucket/runs/one'


@pytest.fixture
def bucket(url):
    return Bucket(url)


@pytest.fixture
def log(caplog):
    """Returns a function for the lines that users see."""
    logger = logging.getLogger('maxlm')
    logger.propagate = True
    with caplog.at_level(logging.INFO, 'maxlm'):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == 'maxlm']
