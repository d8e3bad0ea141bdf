"""Tests that parsing and tokenizing are bounded in size, number and time, and do not block other requests."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer import limited_encoding
from maxlm.errors import EXIT_DONE
from maxlm.sandbox.limited_process import ProcessLimits
from maxlm.serving.limits import ServerLimits
from tests.conftest import ROOT
from tests.data.tokenizer.hostile_files import ACCEPTED, load, tokenizer_file
from tests.serving.fake_engine import FakeEngine, served_by
from tests.serving.hostile import request
from tests.serving.serving_thread import ServerThread
from tests.waiting import until

COMPLETIONS, CHAT = '/v1/completions', '/v1/chat/completions'
SMALL = {'prompt': 'a', 'max_tokens': 3, 'seed': 1}
# A body of the default maximum size.
LARGE = {'prompt': ' ' * (ServerLimits().max_request_bytes - 100), 'max_tokens': 1}
TALK = {'messages': [{'role': 'user', 'content': 'Hello'}], 'max_tokens': 3}
LARGEST_SMALL = 10_000


class Gate:
    """Intercepts texts for the tokenizer and the chat template. Those in `held` wait until `open` is set."""

    def __init__(self, served, held=lambda text: True):
        self.reached, self.open = [], threading.Event()
        self._held = held
        for owner, name in ((served.tokenizer, 'encode_batch'), (served.chat, 'render_prompt')):
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, function):
        def watched(given, **options):
            # Special tokens alone pass no texts to the tokenizer.
            for first in given[:1]:
                self.reached.append(first)
                if self._held(first):
                    self.open.wait(30)
            return function(given, **options)

        return watched


@pytest.fixture
def start():
    """Starts a server whose tokenizer has a gate, which is opened at the end."""
    entered = []

    def start(held=lambda text: True, *, max_context=2**23, **limits):
        engine = FakeEngine(max_context=max_context)
        served = served_by(engine)
        gate = Gate(served, held)
        server = ServerThread(served, limits=ServerLimits(drain_seconds=1, **limits))
        server.__enter__()
        entered.append((server, gate))
        return server, gate

    yield start
    for server, gate in entered:
        gate.open.set()
        server.stop()
        server.join()


def is_large(text):
    return len(text) > LARGEST_SMALL


def post(server, body, path=COMPLETIONS):
    return httpx.post(f'{server.url}{path}', json=body, timeout=30)


def send(server, body, path=COMPLETIONS):
    """Returns a connection that has sent a request and not read the response."""
    connection = server.connect()
    connection.sendall(request(path, json.dumps(body).encode()))
    return connection


def test_a_small_request_is_answered_while_large_ones_are_encoded(start):
    server, gate = start(is_large)
    large = [send(server, LARGE) for _ in range(4)]
    service = server.running.service
    until(lambda: service.num_requests == 4 and gate.reached)
    assert post(server, SMALL).status_code == 200
    # Control: the large requests are waiting.
    until(lambda: service.num_requests == 4)
    gate.open.set()
    for connection in large:
        with connection:
            assert connection.recv(12) == b'HTTP/1.1 200'


def test_a_text_is_answered_while_templates_are_rendered(start):
    server, gate = start(lambda given: isinstance(given, dict))
    talks = [send(server, TALK, CHAT) for _ in range(4)]
    until(lambda: len(gate.reached) == 2)
    assert post(server, SMALL).status_code == 200
    until(lambda: server.running.service.num_requests == 4)
    gate.open.set()
    for connection in talks:
        with connection:
            assert connection.recv(12) == b'HTTP/1.1 200'


def test_requests_of_clients_that_left_are_not_encoded(start):
    server, gate = start(is_large)
    service = server.running.service
    clients = [send(server, LARGE) for _ in range(4)]
    until(lambda: service.body_reader.num_bytes > 3.9 * ServerLimits().max_request_bytes and gate.reached)
    for client in clients:
        client.close()
    until(service.idle.is_set)
    # Only the body that is being encoded is kept in memory.
    assert service.body_reader.num_bytes < 1.1 * ServerLimits().max_request_bytes
    gate.open.set()
    until(lambda: service.body_reader.num_bytes == 0)
    assert post(server, SMALL).status_code == 200
    assert list(map(len, gate.reached)) == [len(LARGE['prompt']), 1]


def test_a_queue_that_is_full(start):
    server, gate = start(max_encoding_queue_size=2)
    # At most two requests are encoded at a time.
    waiting = [send(server, SMALL) for _ in range(2)]
    until(lambda: len(gate.reached) == 2)
    waiting += [send(server, SMALL) for _ in range(2)]
    until(lambda: server.running.service.num_requests == 4)
    refused = post(server, SMALL)
    assert (refused.status_code, refused.json()['error']['code']) == (429, 'queue_full')
    assert int(refused.headers['retry-after']) > 0
    gate.open.set()
    for connection in waiting:
        with connection:
            assert connection.recv(12) == b'HTTP/1.1 200'


@pytest.mark.parametrize(('path', 'body'), [(COMPLETIONS, SMALL), (CHAT, TALK)])
def test_the_timeout_applies_during_encoding(start, path, body):
    server, _ = start(request_timeout=0.1)
    answer = post(server, body, path)
    assert (answer.status_code, answer.json()['error']['code']) == (504, 'timeout')


@pytest.mark.parametrize(
    ('path', 'body', 'code'),
    [
        (COMPLETIONS, {'prompt': ' ' * 4_000_000}, 'context_length_exceeded'),
        (COMPLETIONS, {'prompt': ['a', ' ' * 4_000_000]}, 'context_length_exceeded'),
        (COMPLETIONS, {'prompt': 'a' * 65, 'suffix': 'b' * 64}, 'context_length_exceeded'),
        (COMPLETIONS, {'prompt': [65] * 1_000_000}, 'context_length_exceeded'),
        (COMPLETIONS, {'prompt': [[65], [65] * 129]}, 'context_length_exceeded'),
        (COMPLETIONS, {'prompt': [[]] * 1_000_000}, None),
        (COMPLETIONS, {'prompt': [''] * 1_000_000}, None),
        (CHAT, {'messages': [{'role': 'user', 'content': ''}] * 100_000}, 'context_length_exceeded'),
        (CHAT, {'messages': [{'role': 'user', 'content': [{}] * 1_000_000}]}, 'context_length_exceeded'),
        (COMPLETIONS, b'{"prompt": ' + b'[' * 2_000_000 + b']' * 2_000_000 + b'}', 'invalid_json'),
        (COMPLETIONS, b'{"prompt": "a", "user": ' + b'{"a":' * 500_000, 'invalid_json'),
    ],
    ids=range(11),
)
def test_oversized_requests_are_refused_before_encoding(start, path, body, code):
    server, gate = start(max_context=128)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(server.url + path, content=data, headers={'content-type': 'application/json'}, timeout=30)
    assert (answer.status_code, answer.json()['error']['code']) == (400, code)
    assert gate.reached == []


def test_a_request_that_fills_the_context_is_encoded(start):
    server, gate = start(lambda given: False, max_context=128)
    assert post(server, {'prompt': ' ' * 127, 'max_tokens': 1}).status_code == 200
    assert post(server, {'prompt': [[65] * 127], 'max_tokens': 1}).status_code == 200
    # A template may drop most of its input.
    talk = {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': ''}] * 128}] * 2, 'max_tokens': 1}
    assert post(server, talk, CHAT).status_code == 200
    assert len(gate.reached) > 2


class PanicException(BaseException):
    pass


@pytest.mark.parametrize('error', [PanicException('index out of range'), GeneratorExit(), ValueError(1), MemoryError()])
def test_tokenizer_errors_are_api_errors(start, caplog, error):
    server, _ = start(lambda given: False)

    def fail(given):
        raise error

    tokenizer = server.running.service.served.tokenizer
    working, tokenizer.encode_batch = tokenizer.encode_batch, fail
    answer = post(server, SMALL)
    assert (answer.status_code, answer.json()['error']['code']) == (500, 'internal_error')
    assert 'index' not in answer.text
    until(lambda: 'failed' in caplog.text)
    tokenizer.encode_batch = working
    assert post(server, SMALL).status_code == 200


def test_a_text_that_takes_too_long_is_refused(start, monkeypatch):
    monkeypatch.setattr(limited_encoding, '_LIMITS', ProcessLimits(cpu_seconds=0.3))
    server, _ = start(lambda given: False)
    slow = load(tokenizer_file(**ACCEPTED['digits from the right, as a separator']))
    server.running.service.served.tokenizer.encode_batch = slow.encode_batch
    for path, body in ((COMPLETIONS, {'max_tokens': 1}), ('/tokenize', {})):
        refused = post(server, {'prompt': '1' * 100_000, **body}, path)
        assert (refused.status_code, refused.json()['error']['param']) == (400, 'prompt')
        assert 'takes more than 0.3 s of CPU time; use a shorter text' in refused.json()['error']['message']
    assert post(server, SMALL).status_code == 200


def test_a_template_without_an_end(start):
    source = (
        "{% if messages[0].content == 'go' %}" + '{% for i in range(99999) %}' * 3 + '{% endfor %}' * 3 + '{% endif %}'
    )
    server, _ = start(lambda given: False)
    template = ChatTemplate(source + CHATML, name='test', limits=ProcessLimits(cpu_seconds=0.1))
    server.running.service.served.chat.template = template
    refused = post(server, {'messages': [{'role': 'user', 'content': 'go'}]}, CHAT)
    assert refused.status_code == 400
    assert 'more than 0.1 s of CPU time' in refused.json()['error']['message']
    assert post(server, TALK, CHAT).status_code == 200


def test_a_stuck_encoder_does_not_block_shutdown(start):
    server, gate = start()
    connection = send(server, SMALL)
    until(lambda: gate.reached)
    server.stop()
    with connection:
        assert connection.recv(12) == b'HTTP/1.1 503'
    server.join()
    assert server.exit_code == EXIT_DONE
    assert not gate.open.is_set()


# A separate process, whose exit code is tested. The encoder waits, or does not release the GIL.
PROGRAM = """
import re, sys, threading, time
import maxlm.serving.server as running
from maxlm.sandbox.limited_process import ProcessLimits
from maxlm.serving.limits import ServerLimits
from tests.serving.fake_engine import FakeEngine, served_by
running._END_SECONDS = 1
running._LAST_SECONDS = 0.1
def encode(texts):
    print('reached', flush=True)
    while not server.is_stopping:
        time.sleep(0.01)
    re.match('(a+)+$', 'a' * 64 + 'b') if sys.argv[1] == 'holds' else threading.Event().wait()
served = served_by(FakeEngine())
served.tokenizer.encode_batch = encode
listener = running.bind('127.0.0.1', 0)
server = running.Server(
    served, ServerLimits(drain_seconds=0.1), listener, on_ready=lambda: print(running.server_url(listener), flush=True)
)
sys.exit(running.serve_until_stopped(server))
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(('stuck', 'code'), [('waits', EXIT_DONE), ('holds', 1)])
def test_a_process_with_a_stuck_encoder_ends(stuck, code):
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))}
    command = [sys.executable, '-c', PROGRAM, stuck]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True) as process:
        try:
            port = int(process.stdout.readline().rpartition(':')[2])
            with socket.create_connection(('127.0.0.1', port)) as connection:
                connection.sendall(request(COMPLETIONS, json.dumps(SMALL).encode()))
                assert process.stdout.readline() == 'reached\n'
                # A second SIGTERM would stop the process immediately.
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == code
        finally:
            process.kill()
