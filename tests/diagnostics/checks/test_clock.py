"""Tests the clock check against servers with fake dates, and against the kernel."""

import email.utils
import http.server
import threading
import time

import pytest

from maxlm.diagnostics.checks import clock
from maxlm.diagnostics.checks.clock import check_clock, endpoint_of, evaluate_offset, read_offset
from tests.diagnostics.machines import CPU, case_on


@pytest.fixture
def server():
    """Starts a server that rejects all requests and has its own clock."""

    class Handler(http.server.BaseHTTPRequestHandler):
        behind = 0.0
        date = None

        def do_HEAD(self):
            self.send_response_only(403)
            date_header = (
                self.date if self.date is not None else email.utils.formatdate(time.time() - self.behind, usegmt=True)
            )
            self.send_header('Date', date_header)
            self.send_header('Content-Length', '0')
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
        thread.start()
        server.handler = Handler
        server.url = f'http://127.0.0.1:{server.server_port}'
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(('behind', 'status'), [(0, 'ok'), (60, 'warning'), (-60, 'warning'), (3600, 'failure')])
def test_offset_to_the_clock_of_a_bucket(server, monkeypatch, behind, status):
    server.handler.behind = behind
    monkeypatch.setattr(clock, 'is_synchronized', lambda: True)
    case = case_on(CPU, workdir='gs://bucket/run', environment={'STORAGE_EMULATOR_HOST': server.url})
    assert check_clock(case).status == status


def test_direction_of_the_offset():
    assert '60 s ahead of x' in evaluate_offset(60, 'x').message
    assert '60 s behind x' in evaluate_offset(-60, 'x').message


def test_an_invalid_date(server):
    server.handler.date = 'yesterday'
    assert read_offset(server.url) is None


def test_a_server_that_does_not_respond_has_no_offset():
    assert read_offset('http://127.0.0.1:9') is None


@pytest.mark.parametrize(('is_synchronized', 'status'), [(True, 'ok'), (False, 'warning'), (None, 'skipped')])
def test_synchronization_reported_by_the_kernel(monkeypatch, is_synchronized, status):
    monkeypatch.setattr(clock, 'is_synchronized', lambda: is_synchronized)
    assert check_clock(case_on(CPU)).status == status


@pytest.mark.parametrize(('returned', 'expected'), [(0, True), (5, False), (-1, None)])
def test_the_kernel_call(monkeypatch, returned, expected):
    class Libc:
        def adjtimex(self, buffer):
            assert buffer.raw == bytes(clock.TIMEX_BYTES), 'anything else would set the clock'
            return returned

    monkeypatch.setattr(clock.ctypes, 'CDLL', lambda name, use_errno: Libc())
    monkeypatch.setattr(clock.sys, 'platform', 'linux')
    assert clock.is_synchronized() is expected
    monkeypatch.setattr(clock.sys, 'platform', 'darwin')
    assert clock.is_synchronized() is None


def test_endpoints_of_buckets():
    assert endpoint_of('gs://b/x', {}) == 'https://storage.googleapis.com'
    assert endpoint_of('s3://b/x', {'AWS_REGION': 'eu-west-1'}) == 'https://s3.eu-west-1.amazonaws.com'
    assert endpoint_of('s3://b/x', {'AWS_ENDPOINT_URL': 'http://minio'}) == 'http://minio'
    assert endpoint_of('runs/x', {}) == ''
