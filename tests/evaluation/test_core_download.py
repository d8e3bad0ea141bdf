"""Downloads evaluation bundles from a server on loopback: resumes, verifies, extracts, and reports errors."""

import errno
import hashlib
import http.server
import io
import os
import re
import threading
import zipfile

import pytest

from maxlm.cli.models import evaluate
from maxlm.cli.runs import recipe
from maxlm.errors import InputError
from maxlm.evaluation.tasks import core_download
from maxlm.evaluation.tasks.core_bundle import open_bundle
from maxlm.storage import download, object_store
from tests.evaluation.core_bundles import write_bundle


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD requests for `server.content`, with ranges of bytes."""

    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        content, status = self.server.content, 200
        self.server.paths.append(self.path)
        if target := self.server.redirects.get(self.path):
            self.send_response(302)
            self.send_header('Location', target)
            self.send_header('Content-Length', '0')
            self.end_headers()
            return
        found = re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers.get('Range', ''))
        if found:
            first, last = map(int, found.groups())
            content, status = content[first : last + 1], 206
            self.server.ranges.append((first, last + 1))
        if found and first in self.server.failing:
            content, status = b'', 503
        self.send_response(status)
        self.send_header('ETag', hashlib.sha256(self.server.content).hexdigest())
        self.send_header('Content-Length', str(len(content)))
        self.send_header('Accept-Ranges', 'bytes')
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / 'eval_bundle')


def zipped(bundle, prefix='eval_bundle/'):
    content = io.BytesIO()
    with zipfile.ZipFile(content, 'w', zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(bundle.rglob('*')):
            if file.is_file():
                archive.write(file, f'{prefix}{file.relative_to(bundle)}')
    return content.getvalue()


@pytest.fixture
def server(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(core_download, 'CACHE', str(tmp_path / 'cache'))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        server.content, server.ranges, server.failing = zipped(bundle), [], set()
        server.paths, server.redirects = [], {}
        server.url = f'http://127.0.0.1:{server.server_port}/a/eval_bundle.zip'
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def checksum(content):
    return f'#sha256={hashlib.sha256(content).hexdigest()}'


@pytest.mark.parametrize('prefix', ['eval_bundle/', ''])
def test_a_zip_file_is_downloaded_once(server, bundle, prefix):
    server.content = zipped(bundle, prefix)
    source = server.url + checksum(server.content)
    expected = open_bundle(str(bundle))
    assert open_bundle(source) == expected
    asked = list(server.ranges)
    assert asked == [(0, len(server.content))]
    assert open_bundle(source) == expected
    assert server.ranges == asked


def test_an_interrupted_download_resumes(server, bundle, monkeypatch):
    monkeypatch.setattr(download, 'CHUNK_BYTES', 500)
    server.failing = {1000}
    with pytest.raises(InputError, match=r'--tasks=core:http.*status 503; or give the directory of a local copy$'):
        open_bundle(server.url)
    server.failing.clear()
    server.ranges.clear()
    assert open_bundle(server.url) == open_bundle(str(bundle))
    assert server.ranges[0] == (1000, 1500)


def test_a_wrong_checksum_is_an_error(server, tmp_path):
    with pytest.raises(InputError, match='damaged in two attempts: its sha256 is'):
        open_bundle(server.url + checksum(b'other'))
    assert not list(tmp_path.glob('cache/*/bundle'))


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'no zip file', r'damaged zip file \(File is not a zip file\); run the same command again'),
        ('outside', "the zip file has the path '../outside'"),
        ('other/file', 'has no core.yaml; use an evaluation bundle'),
    ],
)
def test_other_files_are_one_line_errors(server, tmp_path, content, message):
    if isinstance(content, str):
        file = io.BytesIO()
        with zipfile.ZipFile(file, 'w') as archive:
            archive.writestr('../outside' if content == 'outside' else content, 'x')
        content = file.getvalue()
    server.content = content
    with pytest.raises(InputError, match=message) as info:
        open_bundle(server.url, key='eval.tasks')
    assert str(info.value).startswith(f'eval.tasks=core:{server.url}')
    assert '\n' not in str(info.value)
    assert not list(tmp_path.rglob('outside'))


def test_a_checksum_in_capital_letters(server):
    assert len(open_bundle(f'{server.url}#sha256={hashlib.sha256(server.content).hexdigest().upper()}')) == 3
    with pytest.raises(InputError, match='download damaged in two attempts'):
        open_bundle(f'{server.url}#sha256={64 * "A"}')


@pytest.mark.parametrize('suffix', ['#sha256=12', '#sha256=', '?x=1#sha256=' + 64 * 'g'])
def test_malformed_checksums_are_refused(server, suffix):
    with pytest.raises(InputError, match=r'#sha256= must follow the URL of a .zip file and precede 64 digits'):
        open_bundle(server.url + suffix)
    assert not server.ranges


def test_a_server_that_does_not_answer(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(InputError, match=r'no answer \(Connection refused\); or give the directory of a local copy$'):
        open_bundle(server.url)


def test_a_directory_is_copied(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(core_download, 'CACHE', str(tmp_path / 'cache'))
    found = open_bundle(f'file://{bundle}')
    assert found == open_bundle(str(bundle))
    with pytest.raises(InputError, match=r'#sha256= must follow the URL of a .zip file'):
        open_bundle(f'file://{bundle}{checksum(b"")}')


def test_data_sets_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(core_download, 'CACHE', str(tmp_path / 'cache'))
    asked = []

    def list_tree(url, directory):
        asked.append(url)
        raise InputError(f'{url}: no answer (offline)')

    monkeypatch.setattr(core_download, 'list_tree', list_tree)
    with pytest.raises(InputError, match=r'--tasks=core:hf:me/bundle@v1/core.zip: hf://.*offline\); or give'):
        open_bundle('hf:me/bundle@v1/core.zip')
    assert asked == ['hf://datasets/me/bundle@v1/core.zip']


def test_only_the_bundle_may_be_a_url(server):
    parser = evaluate.make_parser()
    for tasks in (f'core:{server.url},arc_easy', 'core:hf:me/bundle', f'core:{server.url}#sha256={64 * "0"}'):
        assert parser.parse_args(['--checkpoint=runs/x', f'--tasks={tasks}']).tasks == tasks
    for tasks in (server.url, f'humaneval:{server.url}', 'core:nowhere://x'):
        with pytest.raises(InputError, match=r'--tasks=(http.*: URLs are not|nowhere.*unknown protocol)'):
            parser.parse_args(['--checkpoint=runs/x', f'--tasks={tasks}'])


def test_recipes_download_before_the_first_phase(server):
    phases = [['evaluate', '--checkpoint=runs/x', f'--tasks=core:{server.url}']]
    recipe.check_inputs(phases, [None])
    assert server.ranges
    server.content = b''
    with pytest.raises(InputError, match=r'phase 1 of 1 \(evaluate\): --tasks=core:'):
        recipe.check_inputs([[*phases[0][:2], f'--tasks=core:{server.url}?2']], [None])


def test_the_proxy_of_the_environment_is_used(server, monkeypatch):
    # The name of the host does not exist; only the proxy can answer.
    monkeypatch.setenv('http_proxy', f'http://127.0.0.1:{server.server_port}')
    monkeypatch.delenv('no_proxy', raising=False)
    monkeypatch.delenv('NO_PROXY', raising=False)
    object_store._filesystem.cache_clear()
    url = 'http://bundles.invalid/eval_bundle.zip'
    assert len(open_bundle(url)) == 3
    assert {path for path in server.paths if path.startswith('http:')} == {url}


def test_a_full_disk_is_one_line(server, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, 'extractall', full)
        with pytest.raises(InputError, match='No space left on device') as caught:
            open_bundle(server.url)
        assert '\n' not in str(caught.value)
    # The complete download is kept.
    server.failing.update(range(0, 2**20))
    assert len(open_bundle(server.url)) == 3


def test_redirects_are_followed(server):
    server.redirects['/latest/eval_bundle.zip'] = server.url
    url = server.url.replace('/a/', '/latest/')
    assert len(open_bundle(url + checksum(server.content))) == 3


def test_paths_outside_the_cache_are_refused(server, tmp_path):
    for name in ('../../../outside', '/tmp/outside', 'eval_bundle/../../outside'):
        content = io.BytesIO()
        with zipfile.ZipFile(content, 'w') as archive:
            archive.writestr(name, 'x')
            archive.writestr('eval_bundle/core.yaml', 'x')
        server.content = content.getvalue()
        with pytest.raises(InputError, match='the zip file has the path'):
            open_bundle(server.url + checksum(server.content))
    assert not [path for path in tmp_path.rglob('*') if path.name == 'outside']
