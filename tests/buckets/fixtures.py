"""Fixtures of the bucket emulators. Each has an empty bucket with the name `bucket`."""

import os

import pytest

# gcsfs reads the variable at import. Its variant for zonal buckets connects to Google by gRPC.
os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'false'

# The emulators and their libraries are imported by the fixtures, because most processes of tests use none.


@pytest.fixture
def gcs(monkeypatch):
    from tests.buckets import gcs

    with gcs.running(monkeypatch) as server:
        server.buckets.add('bucket')
        yield server


@pytest.fixture
def s3(monkeypatch):
    from tests.buckets import s3

    with s3.running(monkeypatch) as client:
        client.create_bucket(Bucket='bucket')
        yield client
