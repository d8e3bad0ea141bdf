"""Fixtures for the files of a bucket that tests of the shard cache download."""

import hashlib
import random

import pytest

from maxlm.storage.download import RemoteFile

SIZE = 1000
CONTENTS = [random.Random(seed).randbytes(SIZE) for seed in range(8)]


@pytest.fixture
def files(tmp_path):
    return [
        RemoteFile(
            f'gs://bucket/data/{number}', tmp_path / 'cache' / str(number), SIZE, hashlib.sha256(content).hexdigest()
        )
        for number, content in enumerate(CONTENTS)
    ]


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def gcs(gcs):
    for number, content in enumerate(CONTENTS):
        gcs.put('bucket', f'data/{number}', content)
    return gcs
