"""Fuzzes the bytes of HTTP connections."""

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.serving.test_http_protocol import BODY, CHUNKED, GOOD, HEALTH, TEXT, head, in_chunks, text_of, with_length

STATUSES = {200, 400, 403, 404, 405, 413, 415, 431}
# Without HEAD, whose responses have no body.
LINES = st.builds(
    lambda *parts: b' '.join(parts),
    st.sampled_from([b'POST', b'GET', b'DELETE', b'OPTIONS', b'PUT', b'CONNECT', b'PRI', b'SOURCE', b'get', b'']),
    st.sampled_from(
        [b'/v1/completions', b'/health', b'/', b'/tokenize', b'*', b'http://x/', b'a:1', b'//', b'/%ff?a#b']
    ),
    st.sampled_from([b'HTTP/1.1', b'HTTP/1.0', b'HTTP/0.9', b'HTTP/2.0', b'RTSP/1.0', b'HTTP/1.1 ']),
)
HEADERS = st.sampled_from(
    [
        *(b'Content-Length: %d' % len(BODY), b'Content-Length: 0', b'Content-Length: 5', b'Content-Length: 99999'),
        *(b'Content-Length: +5', b'content-length : 5', b'Content-Length: 18446744073709551615'),
        *(CHUNKED, b'Transfer-Encoding: gzip, chunked', b'Transfer-Encoding: xchunked', b'Transfer-Encoding: identity'),
        *(b'Expect: 100-continue', b'Expect: x', b'Connection: close', b'Connection: keep-alive, upgrade'),
        *(b'Upgrade: h2c', b'Upgrade: websocket', b'Connection: Upgrade', b'Sec-WebSocket-Key: x', b'Trailer: Host'),
        *(
            b'Host: evil.example',
            b'Host: 127.0.0.1?.evil.example',
            b'Origin: null',
            b'X:' + b' ' * 5000,
            b' folded',
            b'X',
        ),
        *(b'X: y\rZ: z', b'X: y\nZ: z', b'X: \x00', b'X: \xff', b'X: ' + b'y' * 9000, b'Content-Encoding: gzip'),
    ]
)
CHUNKS = st.lists(
    st.builds(
        lambda size, extension, data, end: (b'%x' % len(data) if size is None else size) + extension + end + data + end,
        st.sampled_from([None, None, None, b'0', b'1', b'-1', b'ffffffffffffffff', b'0' * 30 + b'1', b' 1', b'']),
        st.sampled_from([b'', b'', b';a=b', b';a="b', b';' + b' ' * 2000, b';\x00']),
        st.sampled_from([BODY, BODY[:5], BODY[5:], b'x', b'', b'[' * 500, b'\xff']),
        st.sampled_from([b'\r\n', b'\r\n', b'\r\n', b'\n', b'\r']),
    ),
    max_size=6,
).map(b''.join)
BODIES = st.one_of(
    st.just(BODY),
    CHUNKS.map(lambda chunks: chunks + b'0\r\n\r\n'),
    CHUNKS,
    st.just(in_chunks(BODY)),
    st.just(in_chunks(BODY, trailers=b'Content-Type: a/b\r\nX: y\r\n')),
    st.binary(max_size=40),
)
REQUESTS = st.one_of(
    st.builds(
        lambda line, headers, body: head(*headers, line=line) + body, LINES, st.lists(HEADERS, max_size=4), BODIES
    ),
    st.builds(lambda headers, body: head(*headers) + body, st.lists(HEADERS, max_size=2), BODIES),
    st.sampled_from([GOOD, HEALTH, b'\r\n', with_length(b'Upgrade: h2c', b'Connection: upgrade')]),
    st.binary(max_size=40),
)


def changed(requests, place, byte):
    content = bytearray(b''.join(requests))
    if byte is not None and content:
        content[place % len(content)] = byte
    return bytes(content)


CONTENTS = st.builds(
    changed, st.lists(REQUESTS, min_size=1, max_size=4), st.integers(0, 4000), st.none() | st.integers(0, 255)
)
UPGRADE = with_length(b'Connection: Upgrade', b'Upgrade: h2c')


@pytest.fixture
def records():
    """Errors and warnings of the log, for all examples of a test."""
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(record)

    handler = Handler(logging.WARNING)
    logging.getLogger().addHandler(handler)
    yield found
    logging.getLogger().removeHandler(handler)


@given(content=CONTENTS, cuts=st.lists(st.integers(1, 3000), max_size=5))
@example(head(b'Content-Length: 5', CHUNKED) + in_chunks(), [])
@example(head(b'Transfer-Encoding: gzip, chunked') + in_chunks(BODY), [])
@example(head(CHUNKED) + in_chunks(*[b' '] * 30_000), [])
@example(head(CHUNKED) + in_chunks(BODY, trailers=b'x:y\r\n' * 20_000), [])
@example(head(b'X:' + b' ' * 15_000 + b'\x00'), [])
@example(head(CHUNKED) + b'1;' + b' ' * 15_000 + b'\n\r\n', [])
@example(head(line=b'CONNECT / HTTP/1.1'), [])
@example(UPGRADE + UPGRADE + GOOD, [200])
@example(GOOD + head(CHUNKED) + b'x', [])
@example(HEALTH * 600, [])
@example(head(b'Host: 127.0.0.1?.evil.example')[len(b'POST') :], [4])
def test_every_connection_gets_well_formed_responses(harness, records, content, cuts):
    segments, rest = [], content
    for cut in cuts:
        segments, rest = [*segments, rest[:cut]], rest[cut:]
    # Malformed responses raise.
    answers, _ = harness.exchange([*segments, rest])
    assert {answer.status for answer in answers} <= STATUSES
    assert all(b'Traceback' not in answer.body for answer in answers)
    assert records == []
    # Other connections are served, and nothing is kept.
    ((good,), _) = harness.exchange([GOOD])
    assert text_of(good) == TEXT
    assert harness.service.idle.is_set()
    assert not harness.service.pending
