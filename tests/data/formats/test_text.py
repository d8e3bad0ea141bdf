import os

import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import FileRange, read_documents, split_file
from maxlm.errors import InputError


@pytest.mark.parametrize(
    ('content', 'text'),
    [
        (b'text\r\n', 'text\r\n'),
        ('\ufeffä\u2028 👩‍👩‍👧'.encode(), 'ä\u2028 👩‍👩‍👧'),
        (b'\x00', '\x00'),
        (b'a' * 3_000_000, 'a' * 3_000_000),
    ],
)
def test_each_file_is_one_document(tmp_path, read, content, text):
    (tmp_path / 'notes.xyz').write_bytes(content)
    assert [(d.name, d.source, d.text) for d in read(tmp_path / 'notes.xyz', target_bytes=1)] == [
        ('notes.xyz', 'notes.xyz', text)
    ]


def test_an_empty_file_gives_no_document(tmp_path, read):
    for name in ('a.txt', 'b.jsonl'):
        (tmp_path / name).write_bytes(b'')
    assert read(tmp_path) == []


def test_bytes_that_are_not_utf8_are_named(tmp_path, read, bad_records):
    (tmp_path / 'a.txt').write_bytes(b'ab\xff')
    (tmp_path / 'b.txt').write_bytes(b'ab\xc3\xa4')
    assert bad_records(tmp_path) == [('a.txt', f'{tmp_path}/a.txt: byte 2 is not UTF-8; save the file as UTF-8')]
    assert [d.text for d in read(tmp_path, on_bad=lambda *_: None)] == ['abä']
    with pytest.raises(InputError, match=r'a\.txt: byte 2 .*--skip-bad-records'):
        read(tmp_path)


def test_a_dangling_link_is_unreadable(tmp_path, read, bad_records):
    (tmp_path / 'good.txt').write_text('good')
    (tmp_path / 'gone.txt').symlink_to(tmp_path / 'nothing')
    assert bad_records(tmp_path) == [('gone.txt', f'{tmp_path}/gone.txt: No such file or directory')]
    assert [d.text for d in read(tmp_path, on_bad=lambda *_: None)] == ['good']


@pytest.mark.parametrize('name', ['x.txt', 'x.jsonl', 'x.jsonl.gz', 'x.parquet', 'x.npy', 'x.npz', 'x.bin'])
def test_a_deleted_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b'content')
    (file,) = find_inputs([tmp_path / name])
    (tmp_path / name).unlink()
    (file_range,) = split_file(file, 100)
    assert file_range == FileRange(file, 0, 0, 7)
    with pytest.raises(InputError, match=rf'{name}: No such file or directory'):
        list(read_documents(file_range, ReadOptions()))


def test_a_file_without_permission_is_named(tmp_path, monkeypatch, read):
    secret = tmp_path / 'secret.txt'
    secret.write_text('x')
    # Uses a relative path, because the parent directories may also be inaccessible to the other user.
    monkeypatch.chdir(tmp_path)
    assert len(read('secret.txt')) == 1
    secret.chmod(0)
    user = os.geteuid()
    if user == 0:
        # Permissions do not restrict root.
        os.seteuid(65534)
    try:
        with pytest.raises(InputError, match=r'secret\.txt: Permission denied'):
            read('secret.txt')
    finally:
        os.seteuid(user)
