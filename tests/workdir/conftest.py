"""Buckets on loopback, and directories that look like a run's."""

from __future__ import annotations

import logging

import pytest

from maxlm.storage.bucket import Bucket
from tests.buckets import gcs as gcs_buckets
from tests.buckets import s3 as s3_buckets
from tests.gcs_emulator import FaultyServer


@pytest.fixture
def gcs(monkeypatch):
    with gcs_buckets.running(monkeypatch, FaultyServer) as server:
        server.buckets.add('bucket')
        yield server


@pytest.fixture(params=['gs', 's3'])
def url(request, monkeypatch):
    """Of a run that nobody has started, in each kind of bucket."""
    if request.param == 'gs':
        request.getfixturevalue('gcs')
        yield 'gs://bucket/runs/one'
        return
    with s3_buckets.running(monkeypatch) as client:
        client.create_bucket(Bucket='bucket')
        yield 's3://bucket/runs/one'


@pytest.fixture
def bucket(url):
    return Bucket(url)


@pytest.fixture
def log(caplog):
    """The lines that a person sees."""
    logger = logging.getLogger('maxlm')
    logger.propagate = True
    with caplog.at_level(logging.INFO, 'maxlm'):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == 'maxlm']
