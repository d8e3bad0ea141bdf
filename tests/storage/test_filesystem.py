import datetime
import importlib
import os
import re
import sys

import fsspec
import pytest

from maxlm.installation import pip_install
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import (
    _remote_entry,
    display_path,
    is_url,
    list_directory,
    open_file,
    read_bytes,
    stat,
    walk,
)


@pytest.fixture
def bucket():
    """Returns the URL of an empty directory in memory."""
    filesystem = fsspec.filesystem('memory')
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = ['']
    yield 'memory://bucket'
    filesystem.store.clear()


def fill(root, contents):
    for name, content in contents.items():
        with fsspec.open(f'{root}/{name}', 'wb', auto_mkdir=True) as file:
            file.write(content)


CONTENTS = {'a.txt': b'1', 'd/b.txt': b'22', 'd/.h/c.txt': b'333', 'd/e/f.txt': b''}


@pytest.fixture(params=['local', 'remote'])
def root(request, tmp_path, bucket):
    path = str(tmp_path) if request.param == 'local' else bucket
    fill(path, CONTENTS)
    return path


def test_files_and_directories_are_distinguished(root):
    file = stat(f'{root}/d/b.txt')
    assert (file.path, file.name, file.size, file.is_directory) == (f'{root}/d/b.txt', 'b.txt', 2, False)
    assert file.version
    assert stat(f'{root}/d').is_directory
    assert stat(f'{root}/d/').name == 'd'


def test_a_directory_is_listed_sorted(root):
    assert [(entry.path, entry.name, entry.size, entry.is_directory) for entry in list_directory(f'{root}/d')] == [
        (f'{root}/d/.h', '.h', 0, True),
        (f'{root}/d/b.txt', 'b.txt', 2, False),
        (f'{root}/d/e', 'e', 0, True),
    ]


def test_walk_with_skipped_names(root):
    assert {entry.name: entry.size for entry in walk(root)} == {name: len(text) for name, text in CONTENTS.items()}
    kept = {entry.name: entry.path for entry in walk(f'{root}/', skip=lambda name: name.startswith('.'))}
    assert kept == {name: f'{root}/{name}' for name in CONTENTS if '/.' not in name}


def test_read_and_seek(root):
    fill(root, {'long': bytes(range(256)) * 10_000})
    with open_file(f'{root}/long') as file, open_file(f'{root}/long') as other:
        assert file.read(3) == b'\x00\x01\x02'
        # Each open file has its own position.
        assert other.read(2) == b'\x00\x01'
        assert file.read(1) == b'\x03'
        assert file.seek(-6, os.SEEK_END) == 2_560_000 - 6
        assert file.read() == bytes(range(250, 256))
        assert file.seek(2**20 + 5) == 2**20 + 5
        assert file.read(1) == b'\x05'
        assert file.seek(2, os.SEEK_CUR) == 2**20 + 8
        assert file.tell() == 2**20 + 8
    assert file.closed
    assert read_bytes(f'{root}/long') == bytes(range(256)) * 10_000


def test_the_version_changes_with_the_file(root):
    before = stat(f'{root}/a.txt').version
    assert stat(f'{root}/a.txt').version == before
    fill(root, {'a.txt': b'2'})
    if not is_url(root):
        os.utime(f'{root}/a.txt', ns=(1, 1))
    assert stat(f'{root}/a.txt').version != before


def test_missing_path_is_named(root):
    for use in (stat, open_file, list_directory, lambda path: list(walk(path))):
        if use in (stat, open_file) or not is_url(root):
            with pytest.raises(StorageError, match=rf'^{root}/none: No such file or directory$'):
                use(f'{root}/none')


def test_links_are_not_followed_and_may_be_dangling(tmp_path):
    fill(tmp_path, CONTENTS)
    (tmp_path / 'gone').symlink_to(tmp_path / 'nothing')
    (tmp_path / 'again').symlink_to(tmp_path / 'd')
    (tmp_path / 'file').symlink_to(tmp_path / 'a.txt')
    found = {entry.name: entry.size for entry in walk(str(tmp_path))}
    assert found == {**{name: len(text) for name, text in CONTENTS.items()}, 'gone': 0, 'file': 1}


def test_version_from_remote_metadata():
    def version(**facts):
        return _remote_entry('gs://b/x', 'x', {'type': 'file', 'size': 1, **facts}).version

    day = datetime.datetime(2024, 1, 2, 3, 4, 5)
    assert version(ETag='"abc"', LastModified=day) == 'abc'
    assert version(generation='17', etag='abc', mtime=day) == '17'
    assert version(LastModified=day) == '2024-01-02T03:04:05'
    assert version() == ''


def test_displayed_urls_have_no_secrets():
    assert display_path('s3://KEY:SECRET@bucket/x') == 's3://bucket/x'
    assert display_path('https://host/x.jsonl?sig=SECRET&a=b') == 'https://host/x.jsonl'
    assert display_path('odd?name@x') == 'odd?name@x'
    assert display_path('gs://bucket/a?.txt') == 'gs://bucket/a?.txt'


@pytest.mark.parametrize(('protocol', 'package', 'extra'), [('gs', 'gcsfs', 'gcs'), ('s3', 's3fs', 's3')])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, protocol, package, extra):
    # With None, importing the package fails as if it were not installed.
    monkeypatch.setitem(sys.modules, package, None)
    # An earlier test may have used the protocol.
    registry = importlib.import_module('fsspec.registry')
    monkeypatch.delitem(registry._registry, protocol, raising=False)
    with pytest.raises(StorageError, match=re.escape(f'requires {package}: {pip_install(extra)}')):
        stat(f'{protocol}://bucket/x')


def test_an_unknown_protocol_is_named():
    with pytest.raises(StorageError, match=r'nothing://x: .*nothing'):
        stat('nothing://x')


def test_url_of_a_failed_read_is_named(bucket, monkeypatch):
    fill(bucket, {'x': b'abc'})
    with open_file(f'{bucket}/x') as file:
        monkeypatch.setattr('fsspec.implementations.memory.MemoryFile.read', lambda *_: 1 / 0)
        with pytest.raises(StorageError, match=r'^memory://bucket/x: cannot be read \(ZeroDivisionError: '):
            file.read()
