"""Generates malformed requests from a seed, and sends raw bytes to a server."""

import contextlib
import json
import random
import socket
import string
from typing import NamedTuple

MAX_BODY = 32 * 1024
PATHS = ('/v1/completions', '/v1/chat/completions', '/v1/embeddings', '/tokenize', '/detokenize')
MESSAGES = [{'role': 'system', 'content': 'Be short.'}, {'role': 'user', 'content': 'Hello'}]
VALID = {
    'model': 'tiny',
    'max_tokens': 3,
    'n': 1,
    'temperature': 1.0,
    'top_p': 0.9,
    'top_k': 5,
    'min_p': 0.1,
    'seed': 1,
    'stop': ['x'],
    'stream': False,
    'stream_options': None,
    'presence_penalty': 0.5,
    'frequency_penalty': 0.5,
    'repetition_penalty': 1.1,
    'logprobs': None,
    'ignore_eos': False,
}
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 127, 128, 129, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**40),
    *(0.0, -0.0, 0.5, 1e-320, 1e-9, 1e308, -1e308, 1.5, 3.0),
    *('', 'x', 'tiny', '0', 'NaN', '\x00', '\ufeff', '\U0010ffff', '<|im_end|>', "'; DROP TABLE", '../../etc/passwd'),
    *('x' * 5000, '’' * 1000, '{{ 7 * 7 }}', '{% raise %}', '%s%n', '\u202e', '🦊' * 50),
    *([], [[]], [None], [''], ['a', 1], [1, 2, 3], [[1], [2]], [256], [257], [258], [-1], [2**70], [True], [1.5]),
    *({}, {'a': 1}, {'type': 'text'}, {'type': 'text', 'text': 'x'}, [{'type': 'text', 'text': 'x'}], [{'role': 1}]),
    *([{'role': 'user', 'content': 'x'}] * 2, [{'type': 'image_url'}], {'include_usage': True}, {'__class__': 1}),
)
EXTRA = ('tools', 'logit_bias', 'functions', 'response_format', 'best_of', 'echo', 'suffix', 'audio', '__init__', '')
RAW = (
    b'',
    b' ',
    b'null',
    b'0',
    b'"x"',
    b'[]',
    b'{',
    b'{}',
    b'{"prompt"}',
    b'{"prompt": }',
    b'{"prompt": "a",}',
    b"{'prompt': 'a'}",
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'\xef\xbb\xbf{"prompt": "a"}',
    '{"prompt": "a"}'.encode('utf-16'),
    b'{"prompt": "a\nb"}',
    b'{"prompt": "a", "prompt": [[1], ["x"]]}',
    b'{"prompt": "a", "max_tokens": ' + b'9' * 5000 + b'}',
    b'{"prompt": [' + b'9' * 5000 + b']}',
    b'[' * 20000,
    b'{"a":' * 5000,
    b'{"prompt": ' + b'[' * 10000 + b']' * 10000 + b'}',
    b'{"messages": ' + b'[{"content": ' * 500 + b'1' + b'}]' * 500 + b'}',
    b'{"prompt": [' + b'1.5,' * 7000 + b'1]}',
    b'{"messages": [' + b'1,' * 15000 + b'1]}',
    b'{"messages": [' + b'{},' * 10000 + b'{}]}',
    b'{"prompt": [' + b'65,' * 10000 + b'65]}',
    b'\x00' * 100,
    b'prompt=a&max_tokens=3',
    b'<xml/>',
)
HEADERS = (
    ['X-Many: y'] * 90,
    ['X-Long: ' + 'y' * 10_000],
    ['Authorization: Bearer ' + 'y' * 3000],
    ['Authorization: \xff\xfe'],
    ['Origin: null'],
    ['Origin: http://evil.example'],
    ['Origin: http://[', 'Origin: http://x'],
    ['Expect: 200-maybe'],
    ['Connection: upgrade', 'Upgrade: websocket', 'Sec-WebSocket-Key: x', 'Sec-WebSocket-Version: 13'],
    ['Connection: Upgrade, HTTP2-Settings', 'Upgrade: h2c', 'HTTP2-Settings: x'],
    ['Content-Encoding: gzip'],
    ['Accept: text/html', 'Accept-Encoding: br', 'Range: bytes=0-1'],
    ['X-Forwarded-For: 1.1.1.1', 'X-Forwarded-Host: evil.example', 'X-HTTP-Method-Override: DELETE'],
    ['Cookie: ' + 'a=b; ' * 500],
)
NO_HTTP = (
    b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03' + bytes(200),
    b'GET\r\n\r\n',
    b'GET / HTTP/9.9\r\nHost: x\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost 127.0.0.1\r\n\r\n',
    b'GET / HTTP/1.1\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: 127.0.0.1\r\n\r\n',
    b'GET /\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n',
    b'GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n',
    b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n',
    b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n',
    b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab',
    b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999999999999999\r\n\r\nab',
    b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n'
    b'Transfer-Encoding: chunked\r\n\r\nZZZ\r\n',
    b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n',
    b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n'
    b'Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ' + b'y' * 100_000 + b'\r\n\r\n',
    b'GET / HTTP/1.1\r\n' + b'X: y\r\n' * 20_000 + b'\r\n',
    b'\r\n' * 1000,
    b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
)


class Hostile(NamedTuple):
    """A malformed request.

    Attributes:
        answer: if False, the server may close the connection without a response.
        cut: if True, the client closes the connection immediately.
    """

    kind: str
    content: bytes
    answer: bool = True
    cut: bool = False


def request(path, body, *, method='POST', headers=(), kind='application/json', host='127.0.0.1'):
    """Returns the bytes of a complete request."""
    lines = [f'{method} {path} HTTP/1.1', f'Host: {host}', *([f'Content-Type: {kind}'] if kind else []), *headers]
    return '\r\n'.join([*lines, f'Content-Length: {len(body)}', '', '']).encode('latin-1') + body


def valid(path):
    """Returns a valid body."""
    bodies = {
        '/v1/chat/completions': VALID | {'messages': MESSAGES},
        '/v1/embeddings': {'model': 'tiny', 'input': ['Once', 'x'], 'encoding_format': 'float', 'dimensions': None},
        '/tokenize': {'prompt': 'Once', 'messages': [], 'return_token_strs': True, 'add_generation_prompt': True},
        '/detokenize': {'tokens': [79, 110]},
    }
    return bodies.get(path, VALID | {'prompt': 'Once', 'echo': True})


class Generator:
    """Generates malformed requests, which are the same for the same seed."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        kinds = {
            self.schema: 60,
            self.message: 8,
            self.raw: 12,
            self.words: 5,
            self.heads: 5,
            self.media: 2,
            self.large: 2,
            self.no_http: 3,
            self.half: 3,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def __iter__(self):
        while True:
            (make,) = self._random.choices(self._kinds, self._weights)
            yield make()

    def _path(self):
        return self._random.choice(PATHS)

    def schema(self):
        path = self._path()
        body = valid(path)
        for _ in range(self._random.randint(1, 3)):
            name = self._random.choice([*body, *EXTRA])
            body[name] = self._random.choice(VALUES)
        if self._random.random() < 0.1:
            del body[self._random.choice(list(body))]
        return Hostile('schema', request(path, json.dumps(body, ensure_ascii=self._random.random() < 0.5).encode()))

    def message(self):
        body = valid(PATHS[1])
        message = dict(self._random.choice(MESSAGES))
        message[self._random.choice(['role', 'content', 'name', 'tool_calls', 'x'])] = self._random.choice(VALUES)
        body['messages'] = self._random.sample([*MESSAGES, message, message], 3)
        return Hostile('message', request(PATHS[1], json.dumps(body).encode()))

    def raw(self):
        body = self._random.choice(RAW)
        if self._random.random() < 0.4:
            # A valid body in which a few bytes are changed.
            changed = bytearray(json.dumps(valid(PATHS[0])).encode())
            for _ in range(self._random.randint(1, 4)):
                changed[self._random.randrange(len(changed))] = self._random.randrange(256)
            body = bytes(changed)
        return Hostile('raw', request(self._path(), body))

    def words(self):
        letters = string.ascii_letters + '/%.:?#&=~;@'
        path = '/' + ''.join(self._random.choices(letters, k=self._random.choice([0, 3, 20, 2000])))
        path = self._random.choice([path, '/v1/models/' + path, '/%00', '/%ff%fe', '/../../etc/passwd', '//', *PATHS])
        method = self._random.choice(['GET', 'POST', 'PUT', 'DELETE', 'PATCH', 'OPTIONS', 'TRACE', 'BREW'])
        return Hostile('words', request(path, b'', method=method))

    def heads(self):
        host = self._random.choice(['127.0.0.1', 'localhost', 'evil.example', '[::1]', '127.0.0.1:x', '[', ''])
        headers = self._random.choice(HEADERS)
        body = json.dumps(valid(PATHS[0])).encode()
        # Some servers do not accept two Host headers, or an invalid one, as HTTP.
        return Hostile(
            'heads', request(PATHS[0], body, headers=headers, host=host), answer=host in ('127.0.0.1', 'localhost')
        )

    def media(self):
        kind = self._random.choice(
            ['', 'text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data', 'a/b']
        )
        return Hostile('media', request(self._path(), json.dumps(valid(PATHS[0])).encode(), kind=kind))

    def large(self):
        size = self._random.choice([MAX_BODY + 1, 2 * MAX_BODY, 6 * MAX_BODY])
        body = b'{"prompt": "' + b'a' * size + b'"}'
        if self._random.random() < 0.5:
            return Hostile('large', request(self._path(), body))
        head = request(self._path(), b'').replace(b'Content-Length: 0', b'Transfer-Encoding: chunked')
        return Hostile('large', head + b'%x\r\n%s\r\n0\r\n\r\n' % (len(body), body))

    def no_http(self):
        return Hostile('no http', self._random.choice(NO_HTTP), answer=False)

    def half(self):
        complete = request(self._path(), json.dumps(valid(PATHS[0]) | {'stream': True, 'max_tokens': 200}).encode())
        # The client may also send the complete request and disconnect before the response.
        size = self._random.choice([len(complete), self._random.randrange(1, len(complete))])
        return Hostile('half', complete[:size], answer=False, cut=True)


class Wire:
    """Sends bytes over one connection until it closes."""

    def __init__(self, port):
        self._port, self._socket, self._rest = port, None, b''

    def close(self):
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b''

    def exchange(self, hostile):
        """Returns status and body of the response, or None if the server or the client closed the connection."""
        if hostile.cut or not hostile.answer:
            self.close()
        if self._socket is None:
            self._socket = socket.create_connection(('127.0.0.1', self._port), timeout=20)
        try:
            self._socket.sendall(hostile.content)
            if hostile.cut:
                self.close()
                return None
            if not hostile.answer:
                # The server may already have closed the connection.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
            answer = self._read()
        except (ConnectionError, EOFError):
            self.close()
            return None
        if not hostile.answer:
            self.close()
        return answer

    def _read(self):
        while b'\r\n\r\n' not in self._rest:
            self._more()
        head, _, self._rest = self._rest.partition(b'\r\n\r\n')
        status = int(head.split()[1])
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(b':') for line in head.split(b'\r\n')[1:])
        }
        if status == 100:
            return self._read()
        if b'content-length' in headers:
            size = int(headers[b'content-length'])
            while len(self._rest) < size:
                self._more()
            body, self._rest = self._rest[:size], self._rest[size:]
        else:
            while not self._rest.endswith(b'0\r\n\r\n'):
                self._more()
            body, self._rest = self._rest, b''
        if headers.get(b'connection') == b'close':
            self.close()
        return status, body

    def _more(self):
        found = self._socket.recv(1 << 16)
        if not found:
            raise EOFError
        self._rest += found
