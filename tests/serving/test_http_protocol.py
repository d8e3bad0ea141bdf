"""Tests that malformed and hostile HTTP gets one clear error in bounded memory, and never a wrong response."""

import json

import pytest

from maxlm.serving.limits import ServerLimits
from tests.serving.fake_engine import REPLY
from tests.serving.protocol_harness import Harness, parse_answers

HOST = b'Host: 127.0.0.1'
JSON = b'Content-Type: application/json'
CHUNKED = b'Transfer-Encoding: chunked'
BODY = json.dumps({'prompt': 'a', 'max_tokens': 3, 'temperature': 0}).encode()
TEXT = REPLY[:3]


def head(*headers, line=b'POST /v1/completions HTTP/1.1'):
    return b'\r\n'.join([line, HOST, JSON, *headers, b'', b''])


def with_length(*headers, body=BODY):
    return head(*headers, b'Content-Length: %d' % len(body)) + body


def in_chunks(*chunks, trailers=b''):
    return b''.join(b'%x\r\n%s\r\n' % (len(chunk), chunk) for chunk in chunks) + b'0\r\n' + trailers + b'\r\n'


GOOD = with_length()
HEALTH = head(line=b'GET /health HTTP/1.1')


def text_of(answer):
    assert answer.status == 200, answer
    return json.loads(answer.body)['choices'][0]['text']


@pytest.mark.parametrize(
    'request_bytes',
    [
        head(CHUNKED) + in_chunks(BODY),
        head(CHUNKED) + in_chunks(BODY[:1], BODY[1:7], BODY[7:]),
        head(b'transfer-encoding:  Chunked ') + in_chunks(BODY),
        head(CHUNKED) + b'0' * 20 + b'%x;name=value;other="a;b"\r\n%s\r\n00\r\n\r\n' % (len(BODY), BODY),
        # Trailers do not override headers.
        head(CHUNKED) + in_chunks(BODY, trailers=b'Content-Type: text/plain\r\nHost: evil.example\r\n'),
        head(b'Content-Length: 00%d ' % len(BODY)) + BODY,
        b'\r\n\r\n' + GOOD,
        with_length(b'Expect: 100-continue'),
        # Java's client asks for HTTP/2 in each request.
        with_length(
            b'Connection: Upgrade, HTTP2-Settings', b'Upgrade: h2c', b'HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA'
        ),
        head(b'Connection: Upgrade', b'Upgrade: h2c', CHUNKED) + in_chunks(BODY[:9], BODY[9:]),
        with_length(b'Connection: upgrade', b'Upgrade: websocket', b'Sec-WebSocket-Key: x'),
        with_length(*[b'X-%d: y' % number for number in range(200)]),
        with_length(b'X: ' + b'y' * 20_000),
    ],
)
@pytest.mark.parametrize('size', [1, 7, 100_000])
def test_unusual_requests_are_answered(harness, request_bytes, size):
    segments = [request_bytes[start : start + size] for start in range(0, len(request_bytes), size)]
    (answer,), is_closed = harness.exchange(segments)
    assert (text_of(answer), is_closed) == (TEXT, False)


def test_old_clients_get_an_answer_and_a_closed_connection(harness):
    (answer,), is_closed = harness.exchange([GOOD.replace(b'HTTP/1.1', b'HTTP/1.0')])
    assert (text_of(answer), is_closed) == (TEXT, True)


@pytest.mark.parametrize(
    'request_bytes',
    [
        # A proxy could find another end of these bodies.
        head(CHUNKED, b'Content-Length: 5') + in_chunks(),
        head(b'Content-Length: 5', CHUNKED) + in_chunks(),
        head(b'Content-Length: 2', b'Content-Length: 2') + b'{}',
        head(b'Content-Length: 2', b'Content-Length: 3') + b'{}',
        *(
            head(b'Content-Length: ' + length) + b'{}'
            for length in (b'+2', b'-2', b'0x2', b'2,2', b'2 2', b'2;', b'', b'\xb2', b'9' * 20)
        ),
        *(
            head(b'Transfer-Encoding: ' + coding) + in_chunks(BODY)
            for coding in (
                *(b'gzip, chunked', b'chunked, gzip', b'chunked, chunked', b'xchunked', b'chunked;q=1', b'identity'),
                *(b'gzip', b',chunked', b'"chunked"', b'', b'\x0bchunked', b'chunked\x00'),
            )
        ),
        head(b'Transfer-Encoding: gzip', CHUNKED) + in_chunks(BODY),
        head(CHUNKED, CHUNKED) + in_chunks(BODY),
        head(b'Transfer-Encoding : chunked') + in_chunks(BODY),
        head(b'Transfer-Encoding:\r\n chunked') + in_chunks(BODY),
        head(CHUNKED, line=b'POST /v1/completions HTTP/1.0') + in_chunks(BODY),
        *(
            head(CHUNKED) + size + b'\r\nx\r\n0\r\n\r\n'
            for size in (
                b'+1',
                b'-1',
                b'0x1',
                b' 1',
                b'1 ',
                b'g',
                b'',
                b'1;\x00',
                b'1' * 17,
                b'1;' + b' ' * 9000 + b'\n',
            )
        ),
        head(CHUNKED) + b'1\r\nxx\r\n0\r\n\r\n',
        head(CHUNKED) + b'1\nx\n0\n\n',
        # Regular expressions with two runs of whitespace took minutes for such a head.
        head(b'X:' + b' ' * 10_000 + b'\x00'),
        head(b'X: a\r\n folded'),
        head(b'X y: z'),
        head(b': z'),
        head(b'X: a\nY: b'),
        head(b'X: a\rb'),
        *(
            head(line=line)
            for line in (
                *(
                    b'GET /health',
                    b'GET /health HTTP/0.9',
                    b'GET /health HTTP/2.0',
                    b'PRI * HTTP/2.0',
                    b'GET /health HTTP/1.2',
                ),
                *(b'GET http://evil.example/health HTTP/1.1', b'OPTIONS * HTTP/1.1', b'CONNECT a:80 HTTP/1.1'),
                *(b'CONNECT / HTTP/1.1', b'GET health HTTP/1.1', b'GET /\xff HTTP/1.1', b'get /health HTTP/1.1', b'x'),
            )
        ),
        b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03' + bytes(200),
    ],
)
def test_malformed_requests_get_one_error(harness, request_bytes):
    (answer,), is_closed = harness.exchange([request_bytes])
    assert (answer.status, answer.headers[b'connection'], is_closed) == (400, b'close', True)
    assert json.loads(answer.body)['error']['code'] == 'invalid_http'
    # The error is no response to the request before.
    answers, is_closed = harness.exchange([GOOD + request_bytes])
    assert is_closed
    assert [text_of(answer) for answer in answers] in ([TEXT], [])


MUCH = 100_000


@pytest.mark.parametrize(
    ('request_bytes', 'status', 'problem'),
    [
        (head(CHUNKED) + in_chunks(*[b' '] * MUCH), 400, 'larger chunks'),
        (head(CHUNKED) + b'1;' + b'a=b;' * MUCH, 400, 'larger chunks'),
        (head(CHUNKED) + b'1;a="' + b'b' * MUCH, 400, 'larger chunks'),
        (head(CHUNKED) + b'0' * MUCH, 400, 'larger chunks'),
        (head(CHUNKED) + b'0\r\n' + b'x:y\r\n' * MUCH, 400, 'larger chunks'),
        (head(CHUNKED) + b'0\r\nx:' + b'y' * MUCH, 400, 'larger chunks'),
        (head(*[b'x:y'] * 300), 431, 'more than 256 headers'),
        (head()[:-2] + b'x:' + b'y' * MUCH, 431, 'more than 32768 bytes'),
        (head()[:-2] + b'y' * MUCH, 431, 'more than 32768 bytes'),
        (head()[:-2] + b'x:' + b' ' * MUCH, 431, 'more than 32768 bytes'),
        (head(line=b'GET /' + b'y' * MUCH), 431, 'more than 32768 bytes'),
    ],
)
def test_heads_and_framing_are_limited(harness, request_bytes, status, problem):
    (answer,), is_closed = harness.exchange([request_bytes])
    assert (answer.status, is_closed) == (status, True)
    assert problem in json.loads(answer.body)['error']['message']


def test_large_bodies_may_have_many_chunks():
    # Without the term for the size of the body, the framing of these chunks would be too large.
    harness = Harness(ServerLimits(max_request_bytes=2**20))
    body = BODY.ljust(800_000)
    (answer,), _ = harness.exchange(
        [head(CHUNKED) + in_chunks(*[body[at : at + 64] for at in range(0, len(body), 64)])]
    )
    harness.close()
    assert text_of(answer) == TEXT


def test_pipelined_requests_are_answered_in_order(harness):
    long = json.dumps({'prompt': 'a', 'max_tokens': 60, 'temperature': 0}).encode()
    answers, is_closed = harness.exchange([with_length(body=long) + HEALTH + GOOD + HEALTH])
    assert not is_closed
    assert [text_of(answer) for answer in answers[::2]] == [REPLY.encode()[:60].decode(errors='ignore'), TEXT]
    assert [json.loads(answer.body) for answer in answers[1::2]] == [{'status': 'ok'}] * 2


def test_the_number_of_waiting_pipelined_requests_is_bounded():
    harness = Harness()
    num = 800
    answers, _ = harness.exchange([HEALTH * num, GOOD * 10])
    harness.close()
    assert [answer.status for answer in answers] == [200] * (num + 10)
    assert 0 < harness.max_waiting < num / 3


def test_malformed_responses_are_detected():
    body = b'HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}'
    assert [answer.body for answer in parse_answers(body * 2)] == [b'{}'] * 2
    for output in (
        *(body + b'x', body[:-1], body[5:], body.replace(b': 2', b': 3')),
        body.replace(b'\r\n\r\n', b'\r\ntransfer-encoding: chunked\r\n\r\n'),
        body.replace(b'content-length: 2', b'content-length: 2\r\ncontent-length: 2'),
    ):
        with pytest.raises(AssertionError):
            parse_answers(output)
