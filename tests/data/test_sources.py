from __future__ import annotations

import json
import os

import pytest

from maxlm.data.sources import find_inputs, read_documents, refuse_overlap
from maxlm.errors import InputError


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(files, **options):
    return [document for file in files for document in read_documents(file, **options)]


def test_a_directory_gives_its_text_files_sorted(tmp_path):
    for name in (
        'b.txt',
        'a/z.py',
        'a/y.md',
        '.hidden.txt',
        '.git/x.txt',
        '__pycache__/x.py',
        'picture.png',
        'skip/x.txt',
    ):
        write(tmp_path / 'books' / name, name)
    (tmp_path / 'books' / 'link').symlink_to(tmp_path / 'books' / 'a')
    files = find_inputs([tmp_path / 'books'], exclude=['skip'])
    assert [(file.name, file.source, file.kind) for file in files] == [
        ('a/y.md', 'books', 'text'),
        ('a/z.py', 'books', 'text'),
        ('b.txt', 'books', 'text'),
    ]
    assert [document.text for document in read(files)] == ['a/y.md', 'a/z.py', 'b.txt']


def test_a_file_is_taken_whatever_its_suffix(tmp_path):
    files = find_inputs([write(tmp_path / 'notes.xyz', 'text\r\n')])
    assert [(d.name, d.text, d.source) for d in read(files)] == [('notes.xyz', 'text\r\n', 'notes.xyz')]


def test_jsonl_documents_are_named_by_line(tmp_path):
    lines = [json.dumps({'text': 'one'}), '', json.dumps({'text': ''}), json.dumps({'text': 'zwei ü\n', 'id': 3})]
    files = find_inputs([write(tmp_path / 'web' / 'x.jsonl', '\n'.join(lines)).parent])
    assert [(d.name, d.text) for d in read(files)] == [('x.jsonl:1', 'one'), ('x.jsonl:4', 'zwei ü\n')]


def test_text_key(tmp_path):
    files = find_inputs([write(tmp_path / 'x.jsonl', '{"text": "no", "content": "yes"}')])
    assert [d.text for d in read(files, text_key='content')] == ['yes']


def test_equal_names_get_their_source_in_front(tmp_path):
    write(tmp_path / 'a' / 'x.txt', '1')
    write(tmp_path / 'b' / 'x.txt', '2')
    assert [file.name for file in find_inputs([tmp_path / 'a', tmp_path / 'b'])] == ['a/x.txt', 'b/x.txt']
    write(tmp_path / 'other' / 'a' / 'x.txt', '3')
    with pytest.raises(InputError, match=r'would both be named a/x\.txt'):
        find_inputs([tmp_path / 'a', tmp_path / 'other' / 'a'])


def test_a_file_is_not_taken_twice(tmp_path):
    write(tmp_path / 'a' / 'b' / 'x.txt', '1')
    with pytest.raises(InputError, match='given twice'):
        find_inputs([tmp_path / 'a', tmp_path / 'a' / 'b'])
    with pytest.raises(InputError, match='in --validation and in --input'):
        refuse_overlap(find_inputs([tmp_path / 'a']), find_inputs([tmp_path / 'a' / 'b' / 'x.txt']))


@pytest.mark.parametrize(
    ('name', 'content', 'parts'),
    [
        ('x.txt', b'ab\xff', ['x.txt', 'byte 2']),
        ('x.jsonl', b'{"text": "a"}\n{"text": "\xff"}', ['x.jsonl:2', 'byte 24']),
        ('x.jsonl', '{"text": "a"}\n{"text": ', ['x.jsonl:2', 'not JSON', '{"text": "…"}']),
        ('x.jsonl', '{"content": "a"}', ['x.jsonl:1', "'text'", '--text_key']),
        ('x.jsonl', '{"text": 3}', ['x.jsonl:1', "'text'"]),
        ('x.jsonl', '["text"]', ['x.jsonl:1', "'text'"]),
        ('x.jsonl', '{"text": "\\ud800"}', ['x.jsonl:1', 'surrogate']),
        ('x.jsonl', '[' * 100_000, ['x.jsonl:1', 'not JSON']),
    ],
)
def test_bad_content_is_named_or_left_out(tmp_path, name, content, parts):
    write(tmp_path / 'in' / name, content)
    write(tmp_path / 'in' / 'good.txt', 'good')
    files = find_inputs([tmp_path / 'in'])
    with pytest.raises(InputError) as info:
        read(files)
    assert all(part in str(info.value) for part in parts), info.value
    assert '\n' not in str(info.value)
    left_out = []
    documents = read(files, on_bad=lambda name, reason: left_out.append((name, reason)))
    assert 'good' in [document.text for document in documents]
    assert len(left_out) == 1
    assert left_out[0][0].startswith(name)


def test_a_dangling_link_is_unreadable(tmp_path):
    write(tmp_path / 'in' / 'good.txt', 'good')
    (tmp_path / 'in' / 'gone.txt').symlink_to(tmp_path / 'nothing')
    with pytest.raises(InputError, match=r'gone\.txt: No such file'):
        read(find_inputs([tmp_path / 'in']))
    assert [d.text for d in read(find_inputs([tmp_path / 'in']), on_bad=lambda *_: None)] == ['good']


def test_missing_and_empty_paths(tmp_path):
    with pytest.raises(InputError, match='nothing: No such file'):
        find_inputs([tmp_path / 'nothing'])
    write(tmp_path / 'in' / 'x.png', b'')
    with pytest.raises(InputError, match=r'in holds no text.*\.jsonl.*\.md'):
        find_inputs([tmp_path / 'in'])


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    secret = write(tmp_path / 'secret.txt', 'x')
    # A relative path: the directories above may be closed to another user too.
    monkeypatch.chdir(tmp_path)
    files = find_inputs(['secret.txt'])
    assert len(read(files)) == 1
    secret.chmod(0)
    user = os.geteuid()
    if user == 0:
        # Permissions do not hold root.
        os.seteuid(65534)
    try:
        with pytest.raises(InputError, match=r'secret\.txt: Permission denied'):
            read(files)
    finally:
        os.seteuid(user)
