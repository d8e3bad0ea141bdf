"""Tests that a tail reads new lines only, detects a rewritten file, and never fails on a line."""

import io
import json

import fsspec
import pytest

from maxlm.storage import jsonl_tail as module
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import list_directory
from maxlm.storage.jsonl_tail import OVERLAP_BYTES, JsonlTail


def line(step, **more):
    return json.dumps({'step': step, **more}) + '\n'


class File:
    """A file in a directory, and the tail that follows it."""

    def __init__(self, folder):
        self.folder, self.path, self.tail = folder, folder / 'x.jsonl', JsonlTail()

    def write(self, text, mode='w'):
        data = text if isinstance(text, bytes) else text.encode()
        with self.path.open(mode + 'b') as file:
            file.write(data)

    def update(self):
        entries = {entry.name: entry for entry in list_directory(str(self.folder))}
        return self.tail.update(entries.get('x.jsonl'))

    @property
    def steps(self):
        return [values['step'] for values in self.tail.lines]


@pytest.fixture
def file(tmp_path):
    return File(tmp_path)


@pytest.fixture
def read_bytes(monkeypatch):
    """Counts the bytes read from files."""
    counts = []
    original = module.open_file

    class Counting(io.BytesIO):
        def read(self, *args):
            content = super().read(*args)
            counts.append(len(content))
            return content

    def opened(path):
        with original(path) as file:
            return Counting(file.read())

    monkeypatch.setattr(module, 'open_file', opened)
    return counts


def test_only_new_bytes_are_read(file, read_bytes):
    first = ''.join(line(step, text='x' * 100) for step in range(1000))
    file.write(first)
    assert file.update()
    assert file.steps == list(range(1000))
    file.write(line(1000), 'a')
    assert file.update()
    assert file.steps == list(range(1001))
    assert read_bytes == [len(first), OVERLAP_BYTES + len(line(1000))]


def test_unchanged_file_is_not_read(file, read_bytes):
    file.write(line(1))
    assert file.update()
    assert not file.update()
    assert len(read_bytes) == 1


def test_incomplete_last_line_is_skipped_until_it_is_complete(file):
    text = line(2, name='ü').encode()
    for cut in range(1, len(text)):
        file.write(line(1).encode() + text[:cut])
        file.tail = JsonlTail()
        file.update()
        assert (file.steps, file.tail.torn) == ([1], True)
        assert file.tail.notes('x.jsonl') == ['x.jsonl: skipped the incomplete last line']
        file.write(text[cut:], 'a')
        file.update()
        assert (file.steps, file.tail.torn, file.tail.notes('x.jsonl')) == ([1, 2], False, [])


@pytest.mark.parametrize('more', [0, 3, 500])
def test_rewritten_file_is_read_from_its_start(file, more):
    file.write(''.join(line(step, time=1) for step in range(100)))
    file.update()
    # As after a rollback, the first lines are unchanged and later lines differ but have the same length.
    file.write(''.join(line(step, time=1 if step < 50 else 2) for step in range(50 + more)))
    file.update()
    assert file.steps == list(range(50 + more))
    assert [values['time'] for values in file.tail.lines] == [1] * 50 + [2] * more


def test_deleted_file_has_no_lines(file):
    file.write(line(1))
    file.update()
    file.path.unlink()
    assert file.update()
    assert (file.steps, file.tail.torn) == ([], False)
    assert not file.update()
    file.write(line(2))
    file.update()
    assert file.steps == [2]


@pytest.mark.parametrize('bad', ['{', 'null', '[1]', '', '{"a": 1} {"b": 2}', '\x00', '"', '[' * 100_000])
def test_invalid_lines_are_skipped_and_counted(file, bad):
    file.write(line(1) + bad + '\n' + line(2))
    file.update()
    assert (file.steps, file.tail.bad) == ([1, 2], 1)
    assert file.tail.notes('x.jsonl') == ['x.jsonl: skipped 1 line that is not JSON']
    file.write(bad + '\n', 'a')
    file.update()
    assert file.tail.notes('x.jsonl') == ['x.jsonl: skipped 2 lines that are not JSON']


def test_invalid_utf8_is_an_invalid_line(file):
    file.write(line(1).encode() + b'\xff\xfe\n' + line(2).encode())
    file.update()
    assert (file.steps, file.tail.bad) == ([1, 2], 1)


def test_read_error_keeps_previous_lines(file, monkeypatch):
    file.write(line(1))
    file.update()
    file.write(line(2), 'a')

    def fail(path):
        raise StorageError(f'{path}: unavailable')

    with monkeypatch.context() as patch:
        patch.setattr(module, 'open_file', fail)
        with pytest.raises(StorageError):
            file.update()
        assert file.steps == [1]
    # The line was not marked as read.
    assert file.update()
    assert file.steps == [1, 2]


def test_in_a_bucket():
    filesystem = fsspec.filesystem('memory')
    tail = JsonlTail()

    def update(text):
        filesystem.pipe_file('/tail_bucket/x.jsonl', text.encode())
        (entry,) = list_directory('memory://tail_bucket')
        return tail.update(entry)

    assert update(line(1))
    assert update(line(1) + line(2) + '{')
    assert ([values['step'] for values in tail.lines], tail.torn) == ([1, 2], True)
    assert update(line(3))
    assert ([values['step'] for values in tail.lines], tail.torn) == ([3], False)
