"""HTTP handler of the storage emulator: JSON API and planned faults."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import re
import socket
import struct
import types
import urllib.parse
from http.server import BaseHTTPRequestHandler

PRECONDITIONS = ('ifGenerationMatch', 'ifGenerationNotMatch', 'ifMetagenerationMatch', 'ifMetagenerationNotMatch')


@dataclasses.dataclass(frozen=True)
class Request:
    """A request, and for media the bytes [start, stop) of the object that were sent."""

    method: str
    # get, media, list, delete, upload, bucket
    kind: str
    name: str
    status: int
    start: int = 0
    stop: int = 0


def break_connection(connection):
    """Resets a connection instead of closing it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


class ApiError(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    # Buffering sends header and body together.
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        with self.store.lock:
            self.store.connections.add(self.connection)

    def finish(self):
        with self.store.lock:
            self.store.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_):
        """Prints nothing, because `requests` records all requests."""

    def do_GET(self):
        self.answer()

    do_POST = do_PUT = do_DELETE = do_GET

    def answer(self):
        url = urllib.parse.urlsplit(self.path)
        self.query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
        # Clients percent-encode slashes in names.
        parts = [urllib.parse.unquote(part) for part in url.path.strip('/').split('/')]
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        self.recorded = Request(self.command, '', '', 200)
        try:
            self.route(parts, body)
        except ApiError as error:
            self.recorded = dataclasses.replace(self.recorded, status=error.status)
            facts = {'error': {'code': error.status, 'message': str(error), 'errors': []}}
            self.send(error.status, json.dumps(facts).encode())

    def route(self, parts, body):
        match parts:
            case ['storage', 'v1', 'b'] if self.command == 'POST':
                self.insert_bucket(json.loads(body)['name'])
            case ['storage', 'v1', 'b', bucket] if self.command == 'GET':
                self.note('bucket', bucket)
                self.check_bucket(bucket)
                self.send_json({'kind': 'storage#bucket', 'id': bucket, 'name': bucket, 'metageneration': '1'})
            case ['storage', 'v1', 'b', bucket, 'o'] if self.command == 'GET':
                self.list_objects(bucket)
            case ['storage' | 'download', *_, 'b', bucket, 'o', name] if self.command == 'GET':
                self.get_object(bucket, name)
            case ['storage', 'v1', 'b', bucket, 'o', name] if self.command == 'DELETE':
                self.delete_object(bucket, name)
            case ['upload', 'storage', 'v1', 'b', bucket, 'o']:
                self.upload(bucket, body)
            case _:
                raise ApiError(501, f'{self.command} {self.path} is not emulated')

    def note(self, kind, name):
        """Records a request and raises planned errors. Returns the kind of a fault that changes the response body."""
        self.recorded = dataclasses.replace(self.recorded, kind=kind, name=name)
        with self.store.lock:
            for fault in self.store.faults:
                if fault.times > 0 and fault.requests == kind and fnmatch.fnmatch(name, fault.match):
                    fault.times -= 1
                    break
            else:
                return None
        if isinstance(fault.kind, int):
            raise ApiError(fault.kind, f'planned: {fault.kind}')
        if fault.kind == 'hold':
            fault.reached.set()
            fault.released.wait()
        return fault.kind

    def check_bucket(self, bucket):
        if bucket not in self.store.buckets:
            raise ApiError(404, 'The specified bucket does not exist.')

    def insert_bucket(self, bucket):
        self.note('bucket', bucket)
        with self.store.lock:
            if bucket in self.store.buckets:
                raise ApiError(409, 'The bucket you tried to create already exists.')
            self.store.buckets.add(bucket)
        self.send_json({'kind': 'storage#bucket', 'name': bucket})

    def find(self, bucket, name):
        with self.store.lock:
            self.check_bucket(bucket)
            stored = self.store.objects.get((bucket, name))
        wanted = self.query.get('generation')
        if stored is None or (wanted and wanted != str(stored.generation)):
            raise ApiError(404, f'No such object: {bucket}/{name}')
        return stored

    def check_preconditions(self, stored):
        """Checks generation preconditions; generation 0 requires that the object does not exist."""
        present = {'Generation': stored.generation if stored else 0, 'Metageneration': 1 if stored else 0}
        for name in PRECONDITIONS:
            if name in self.query:
                subject, negated = re.fullmatch('if(.*?)(Not)?Match', name).groups()
                if (int(self.query[name]) == present[subject]) == bool(negated):
                    raise ApiError(412, f'precondition {name} is not met')

    def list_objects(self, bucket):
        prefix, delimiter = self.query.get('prefix', ''), self.query.get('delimiter', '')
        self.note('list', prefix)
        self.check_bucket(bucket)
        first, last = self.query.get('startOffset', ''), self.query.get('endOffset')
        with self.store.lock:
            objects = sorted((s for (b, _), s in self.store.objects.items() if b == bucket), key=lambda s: s.name)
        entries = {}
        for stored in objects:
            if not stored.name.startswith(prefix) or stored.name < first or (last and stored.name >= last):
                continue
            below, found, _ = stored.name[len(prefix) :].partition(delimiter) if delimiter else ('', '', '')
            name = prefix + below + found if found else stored.name
            entries.setdefault(name, None if found else stored)
        start = int(self.query.get('pageToken', 0))
        stop = start + min(int(self.query.get('maxResults', 1000)), self.store.page_size)
        page = list(entries.items())[start:stop]
        answer = {
            'kind': 'storage#objects',
            'prefixes': [name for name, stored in page if stored is None],
            'items': [stored.resource for _, stored in page if stored],
        }
        if stop < len(entries):
            answer['nextPageToken'] = str(stop)
        self.send_json(answer)

    def get_object(self, bucket, name):
        media = self.query.get('alt') == 'media'
        fault = self.note('media' if media else 'get', name)
        stored = self.find(bucket, name)
        self.check_preconditions(stored)
        if not media:
            self.send_json(stored.resource)
            return
        start, stop = self.range(len(stored.content))
        self.recorded = dataclasses.replace(self.recorded, start=start, stop=stop)
        headers = {
            'X-Goog-Generation': str(stored.generation),
            'X-Goog-Hash': f'crc32c={stored.crc32c}' + ('' if stored.composed else f',md5={stored.md5}'),
            'Content-Type': stored.content_type,
        }
        status = 200
        if 'Range' in self.headers:
            status, headers['Content-Range'] = 206, f'bytes {start}-{stop - 1}/{len(stored.content)}'
        self.send(status, stored.content[start:stop], headers, fault)

    def range(self, size):
        header = self.headers.get('Range')
        if not header:
            return 0, size
        first, last = re.fullmatch(r'bytes=(\d*)-(\d*)', header).groups()
        start, stop = (int(first), int(last) + 1 if last else size) if first else (size - int(last), size)
        if start >= size:
            raise ApiError(416, 'The requested range cannot be satisfied.')
        return max(start, 0), min(stop, size)

    def delete_object(self, bucket, name):
        self.note('delete', name)
        with self.store.lock:
            stored = self.find(bucket, name)
            self.check_preconditions(stored)
            del self.store.objects[bucket, name]
        self.send(204, b'')

    def upload(self, bucket, body):
        kind = self.query.get('uploadType')
        if kind == 'media':
            self.insert(bucket, self.query['name'], body, {})
        elif kind == 'multipart':
            boundary = re.search(r'boundary="?([^";]+)', self.headers['Content-Type'])[1].encode()
            _, facts, content, _ = re.split(rb'(?:^|\r?\n)--' + re.escape(boundary) + rb'(?:--)?', body)
            facts = json.loads(re.split(rb'\r?\n\r?\n', facts, maxsplit=1)[1])
            self.insert(bucket, facts['name'], re.split(rb'\r?\n\r?\n', content, maxsplit=1)[1], facts)
        elif 'upload_id' not in self.query:
            facts = {**json.loads(body or b'{}'), **({'name': self.query['name']} if 'name' in self.query else {})}
            upload_id = f'upload-{next(self.store.generations)}'
            self.store.uploads[upload_id] = {'facts': facts, 'content': b'', 'query': self.query}
            url = f'{self.store.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}'
            self.send(200, b'', {'Location': url})
        else:
            self.upload_part(bucket, body)

    def upload_part(self, bucket, body):
        upload = self.store.uploads.get(self.query['upload_id'])
        if upload is None:
            raise ApiError(404, 'No such upload.')
        if self.command == 'DELETE':
            del self.store.uploads[self.query['upload_id']]
            self.send(499, b'')
            return
        span, total = re.fullmatch(
            r'bytes (\*|\d+-\d+)/(\*|\d+)', self.headers.get('Content-Range', 'bytes */*')
        ).groups()
        if span != '*':
            # Clients may resend bytes.
            upload['content'] = upload['content'][: int(span.partition('-')[0])] + body
        if total != '*' and int(total) == len(upload['content']):
            del self.store.uploads[self.query['upload_id']]
            self.query = upload['query']
            self.insert(bucket, upload['facts']['name'], upload['content'], upload['facts'])
        else:
            received = len(upload['content'])
            self.send(308, b'', {'Range': f'bytes=0-{received - 1}'} if received else {})

    def insert(self, bucket, name, content, facts):
        self.note('upload', name)
        with self.store.lock:
            self.check_bucket(bucket)
            self.check_preconditions(self.store.objects.get((bucket, name)))
            kind = facts.get('contentType', 'application/octet-stream')
            stored = self.store.put(bucket, name, content, content_type=kind, metadata=facts.get('metadata') or {})
        self.send_json(stored.resource)

    def send_json(self, facts):
        self.send(200, json.dumps(facts).encode(), {'Content-Type': 'application/json; charset=UTF-8'})

    def send(self, status, content, headers=types.MappingProxyType({}), fault=None):
        with self.store.lock:
            self.store.requests.append(dataclasses.replace(self.recorded, status=status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        if fault == 'flip':
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault in ('reset', 'truncate'):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            if fault == 'reset':
                break_connection(self.connection)
            return
        self.wfile.write(content)
        self.wfile.flush()
