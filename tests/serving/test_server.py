"""Tests how a server listens and how it stops: on a signal, on a second signal, and after an engine failure."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError
from maxlm.inference.engine.requests import Request
from maxlm.serving.engine_thread import EngineThread
from maxlm.serving.limits import ServerLimits
from maxlm.serving.server import bind, is_loopback, server_url
from tests.conftest import ROOT
from tests.serving.fake_engine import REPLY, FakeEngine, served_by
from tests.serving.serving_thread import ServerThread, request_bytes
from tests.waiting import until

BODY = {'prompt': 'a', 'max_tokens': 30, 'temperature': 0}


def ask(server, answers, **settings):
    """Sends a request in a thread, which appends the response to `answers`."""

    def run():
        answers.append(httpx.post(f'{server.url}/v1/completions', json=BODY | settings, timeout=30))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize('stream', [False, True])
def test_running_requests_finish_and_new_requests_are_refused(stream):
    engine, answers = FakeEngine(), []
    engine.open.clear()
    with ServerThread(served_by(engine), limits=ServerLimits(drain_seconds=30)) as server:
        thread = ask(server, answers, stream=stream)
        until(lambda: engine.state.running == 1)
        server.stop()
        until(lambda: httpx.get(f'{server.url}/health').status_code == 503)
        refused = httpx.post(f'{server.url}/v1/completions', json=BODY)
        assert (refused.status_code, refused.json()['error']['code']) == (503, 'draining')
        assert int(refused.headers['retry-after']) > 0
        assert httpx.get(f'{server.url}/v1/models').status_code == 200
        engine.open.set()
        thread.join(30)
        server.join()
    assert answers[0].status_code == 200
    if stream:
        assert answers[0].text.endswith('data: [DONE]\n\n')
    else:
        assert answers[0].json()['choices'][0]['text'] == REPLY[:30]
    assert server.exit_code == EXIT_DONE
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


@pytest.mark.parametrize('stream', [False, True])
def test_requests_that_exceed_the_shutdown_timeout_are_cut_off(stream):
    engine, answers = FakeEngine(), []
    engine.open.clear()
    with ServerThread(served_by(engine), limits=ServerLimits(drain_seconds=0.2)) as server:
        thread = ask(server, answers, stream=stream)
        until(lambda: engine.state.running == 1)
        server.stop()
        thread.join(30)
        server.join()
    assert '"code":"draining"' in answers[0].text
    assert answers[0].status_code == (200 if stream else 503)
    assert server.exit_code == EXIT_DONE


@pytest.mark.parametrize('stream', [False, True])
def test_an_engine_failure_stops_the_server(stream, caplog):
    engine, answers = FakeEngine(), []
    engine.open.clear()
    with ServerThread(served_by(engine)) as server:
        thread = ask(server, answers, stream=stream)
        until(lambda: engine.state.running == 1)
        engine.broken = RuntimeError('the device is lost')
        thread.join(30)
        server.join()
    assert '"code":"engine_failed"' in answers[0].text
    assert answers[0].status_code == (200 if stream else 500)
    # The cause appears in the log only.
    assert 'the device is lost' not in answers[0].text
    assert 'the device is lost' in caplog.text
    assert server.exit_code == EXIT_FAILED


def test_requests_to_a_failed_engine_do_not_wait():
    async def ask_late():
        loop = asyncio.get_running_loop()
        engine, failed, future = FakeEngine(), asyncio.Event(), loop.create_future()
        engine.broken = RuntimeError('the device is lost')
        pump = EngineThread(engine, failed.set)
        pump.start()
        await failed.wait()
        pump.submit(Request((1,), 2), future.set_result)
        try:
            return (await asyncio.wait_for(future, 20)).finish_reason
        finally:
            assert pump.stop()

    assert asyncio.run(ask_late()) == 'failed'


def test_internal_errors_are_not_disclosed(caplog, monkeypatch):
    engine = FakeEngine()
    with ServerThread(served_by(engine)) as server:
        monkeypatch.setattr(engine, 'check', lambda request: 1 / 0)
        answer = httpx.post(f'{server.url}/v1/completions', json=BODY)
        assert (answer.status_code, answer.json()['error']['code']) == (500, 'internal_error')
        assert 'ZeroDivisionError' not in answer.text
        # The log is written after the response.
        until(lambda: 'ZeroDivisionError' in caplog.text)
        monkeypatch.undo()
        assert httpx.post(f'{server.url}/v1/completions', json=BODY).status_code == 200


def test_the_pump_calls_listeners_in_the_event_loop():
    async def run():
        engine, deltas, threads = FakeEngine(), [], set()

        def listen(delta):
            deltas.append(delta)
            threads.add(threading.current_thread())

        pump = EngineThread(engine, lambda: None)
        pump.start()
        pump.submit(Request((1,), 4), listen)
        while not (deltas and deltas[-1].finish_reason):
            await asyncio.sleep(0.001)
        assert pump.stop()
        return deltas, threads

    deltas, threads = asyncio.run(run())
    assert len(deltas) == 4
    assert threads == {threading.main_thread()}


def test_listening_addresses():
    with bind('127.0.0.1', 0) as first:
        port = first.getsockname()[1]
        assert is_loopback(first)
        assert server_url(first) == f'http://127.0.0.1:{port}'
        first.listen()
        with pytest.raises(InputError, match=f'--port={port}: Address already in use'):
            bind('127.0.0.1', port)
        # A bound socket does not listen yet.
        with bind('127.0.0.1', 0) as second, pytest.raises(ConnectionRefusedError):
            socket.create_connection(second.getsockname())
    with bind('0.0.0.0', 0) as everywhere:
        assert not is_loopback(everywhere)
        assert server_url(everywhere).startswith('http://127.0.0.1:')
    for host, port, fragments in [
        ('256.0.0.1', 0, 'choose another'),
        ('192.0.2.1', 0, 'choose another'),
        ('127.0.0.1', 65_536, 'must be from 0 to 65535'),
        ('127.0.0.1', -1, 'must be from 0 to 65535'),
    ]:
        with pytest.raises(InputError, match=fragments):
            bind(host, port)


# A separate process, which receives signals.
PROGRAM = """
import sys
from maxlm.serving.limits import ServerLimits
from maxlm.serving.server import Server, bind, serve_until_stopped, server_url
from tests.serving.fake_engine import FakeEngine, served_by
engine = FakeEngine()
engine.open.clear()
listener = bind('127.0.0.1', 0)
running = Server(
    served_by(engine), ServerLimits(drain_seconds=60), listener,
    on_ready=lambda: print(server_url(listener), flush=True),
)
sys.exit(serve_until_stopped(running))
"""


def start():
    """Returns the process and its port."""
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))}
    command = [sys.executable, '-c', PROGRAM]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


@pytest.mark.multiprocess
def test_a_second_signal_stops_the_server_at_once():
    process, url = start()
    with process, socket.create_connection(('127.0.0.1', int(url.rpartition(':')[2]))) as connection:
        connection.sendall(request_bytes('/v1/completions', BODY))
        until(lambda: 'maxlm_running 1.0' in httpx.get(f'{url}/metrics').text)
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f'{url}/health').status_code == 503)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
