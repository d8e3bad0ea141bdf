"""Tests that thousands of malformed requests do not break the server, and that valid requests still succeed."""

import collections
import contextlib
import ctypes
import gc
import itertools
import json
import socket

import psutil
import pytest

from maxlm.serving.limits import ServerLimits
from tests.serving.fake_engine import FakeEngine, served_by
from tests.serving.hostile import MAX_BODY, Generator, Hostile, Wire, request
from tests.serving.serving_thread import ServerThread
from tests.waiting import until

MAX_GROWTH = 16 * 2**20
EXPECTED = {200, 400, 403, 404, 405, 413, 415, 431}
# The timeouts are long enough for a busy machine.
LIMITS = ServerLimits(max_request_bytes=MAX_BODY, drain_seconds=1)
GOOD = Hostile('good', request('/v1/completions', json.dumps({'prompt': 'a', 'max_tokens': 3, 'seed': 1}).encode()))


@pytest.fixture(scope='module')
def engine():
    return FakeEngine(max_context=600)


@pytest.fixture(scope='module')
def server(engine):
    with ServerThread(served_by(engine), limits=LIMITS) as server:
        yield server


def resident():
    gc.collect()
    # Free memory is returned to the system first, since retained memory could hide in it.
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def check(hostile, answer):
    """Raises if a response must not be sent to a client."""
    if answer is None:
        assert not hostile.answer, hostile
        return
    status, body = answer
    assert status in EXPECTED, (hostile, body[:500])
    assert b'Traceback' not in body
    assert b'.py' not in body
    if status != 200 and not hostile.content.startswith(b'HEAD'):
        error = json.loads(body)['error']
        assert set(error) == {'message', 'type', 'param', 'code'}
        assert 0 < len(error['message']) < 600


# During the warm-up the server fills its caches, such as token texts and connections.
@pytest.mark.parametrize(
    ('num_requests', 'warm_up'), [(1500, 500), pytest.param(10_000, 2000, marks=pytest.mark.nightly)]
)
def test_no_request_breaks_the_server(server, engine, caplog, num_requests, warm_up):
    wire = Wire(server.port)
    statuses = collections.Counter()
    before = 0
    for number, hostile in enumerate(itertools.islice(Generator(1), num_requests)):
        if number == warm_up:
            before = resident()
        answer = wire.exchange(hostile)
        check(hostile, answer)
        statuses[answer and answer[0]] += 1
    assert resident() - before < MAX_GROWTH
    assert set(statuses) == EXPECTED | {None}
    # The server logged no errors.
    assert [record for record in caplog.records if record.levelname == 'ERROR'] == []
    until(lambda: (engine.state.running, engine.state.waiting) == (0, 0))
    status, body = wire.exchange(GOOD)
    assert (status, json.loads(body)['choices'][0]['text']) == (200, 'he ')
    wire.close()
    # No request is kept.
    until(lambda: server.running.service.body_reader.num_bytes == 0 and server.running.service.idle.is_set())
    assert not server.running.service.pending


def test_a_memory_leak_is_detected():
    before = resident()
    kept = b'x' * (2 * MAX_GROWTH)
    assert resident() - before > MAX_GROWTH
    assert kept


def test_the_generator_is_seeded():
    first, again, other = ([request.content for request in itertools.islice(Generator(seed), 50)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_an_invalid_response_is_detected():
    body = json.dumps({'error': {'message': 'x', 'type': 'x', 'param': None, 'code': None}}).encode()
    check(GOOD, (400, body))
    for answer in [(500, body), (400, b'{"error": {}}'), (400, body.replace(b'"x"', b'"Traceback"')), None]:
        with pytest.raises((AssertionError, KeyError)):
            check(GOOD, answer)


@pytest.fixture(scope='module')
def impatient():
    limits = ServerLimits(body_seconds=0.3, stall_seconds=0.6, drain_seconds=1)
    with ServerThread(served_by(FakeEngine()), limits=limits) as server:
        yield server


@pytest.mark.parametrize('sent', [0, 10, 200, 280])
def test_a_client_that_is_too_slow_is_cut_off(impatient, sent):
    complete = request('/v1/completions', b' ' * 200)
    with impatient.connect() as connection:
        connection.sendall(complete[:sent])
        response = b''
        while found := connection.recv(4096):
            response += found
    # Without a complete head, the server closes the connection without a response.
    assert response.startswith(b'HTTP/1.1 408') == (sent > complete.index(b'\r\n\r\n'))


def test_a_body_without_an_end(server):
    head = request('/v1/completions', b'').replace(b'Content-Length: 0', b'Transfer-Encoding: chunked')
    with server.connect() as connection:
        connection.sendall(head)
        piece = b'10000\r\n' + b'x' * 0x10000 + b'\r\n'
        with pytest.raises(ConnectionError):
            connection.sendall(piece * 1000)
    until(server.running.service.idle.is_set)
    assert server.running.service.body_reader.num_bytes == 0


def test_many_connections():
    limits = ServerLimits(max_connections=20, drain_seconds=1)
    engine = FakeEngine(num_slots=20)
    engine.open.clear()
    with ServerThread(served_by(engine), limits=limits) as server:
        connections = [server.connect() for _ in range(20)]
        for connection in connections:
            connection.sendall(GOOD.content)
        until(lambda: engine.state.running == 20)
        with server.connect() as refused:
            refused.settimeout(20)
            # Closing a connection with unread data is an error for the client.
            with contextlib.suppress(ConnectionError):
                assert refused.recv(1) == b''
        engine.open.set()
        wire = Wire(server.port)
        until(lambda: (answer := wire.exchange(GOOD)) is not None and answer[0] == 200)
        wire.close()
        for connection in connections:
            connection.close()


@pytest.mark.parametrize('sent', [b'', GOOD.content[:9], GOOD.content])
def test_a_new_connection_replaces_the_one_that_is_idle_for_longest(sent):
    limits = ServerLimits(max_connections=20, drain_seconds=1)
    with ServerThread(served_by(FakeEngine()), limits=limits) as server:
        connections = [server.connect() for _ in range(20)]
        for connection in connections:
            connection.sendall(sent)
            if sent == GOOD.content:
                assert connection.recv(12) == b'HTTP/1.1 200'
        with server.connect() as new:
            new.sendall(GOOD.content)
            assert new.recv(12) == b'HTTP/1.1 200'
        # The first connection was closed, and the last one is open.
        with contextlib.suppress(ConnectionError):
            while connections[0].recv(4096):
                pass
        connections[-1].sendall(GOOD.content[len(sent) :] or GOOD.content)
        assert connections[-1].recv(12)
        for connection in connections:
            connection.close()


def test_many_connections_of_one_client():
    limits = ServerLimits(max_client_connections=5, drain_seconds=1)
    engine = FakeEngine()
    engine.open.clear()
    with ServerThread(served_by(engine), limits=limits) as server:
        connections = [server.connect() for _ in range(5)]
        for connection in connections:
            connection.sendall(GOOD.content)
        until(lambda: engine.state.running == 5)
        with server.connect() as refused, contextlib.suppress(ConnectionError):
            assert refused.recv(1) == b''
        engine.open.set()
        # Clients with other addresses are not blocked.
        address = ('127.0.0.2', 0)
        with socket.create_connection(('127.0.0.1', server.port), timeout=20, source_address=address) as other:
            other.sendall(GOOD.content)
            assert other.recv(12) == b'HTTP/1.1 200'
        for connection in connections:
            connection.close()
