"""Fixtures: a server with a fake engine, which a module may replace, its client, and connections without sockets."""

import pytest

from tests.serving.fake_engine import FakeEngine, served_by
from tests.serving.protocol_harness import Harness
from tests.serving.serving_thread import ServerThread, client_of


@pytest.fixture(scope='module')
def engine():
    return FakeEngine()


@pytest.fixture(scope='module')
def server(engine):
    with ServerThread(served_by(engine)) as server:
        yield server


@pytest.fixture(scope='module')
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture(scope='module')
def harness():
    harness = Harness()
    yield harness
    harness.close()
