"""Tests JSON-lines files: reading while they grow, partial lines after a kill, and full disks."""

import json
import logging
import math
import threading

import pytest

from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.storage import jsonl as lines_module
from maxlm.storage.jsonl import JsonlWriter, drop_partial_line, read_lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'x.jsonl'


def test_missing_file_has_no_lines(path):
    assert read_lines(path) == ([], False)


@pytest.mark.parametrize(
    ('content', 'count', 'torn'),
    [
        (b'', 0, False),
        (b'{"a": 1}\n', 1, False),
        (b'{"a": 1}\n{"a": 2}', 1, True),
        (b'{"a": 1}\n{"a"', 1, True),
        # The file ends within a character.
        ('{"a": "ü"}\n{"a": "ü'.encode()[:-1], 1, True),
        (b'{', 0, True),
    ],
)
def test_incomplete_last_line_is_skipped_and_reported(path, content, count, torn):
    path.write_bytes(content)
    found = read_lines(path)
    assert (len(found.lines), found.torn) == (count, torn)
    drop_partial_line(path)
    assert read_lines(path) == (found.lines, False)


@pytest.mark.parametrize('line', [b'{"a": 1', b'nonsense', b'[1]', b'', b'\xff', b'[' * 100_000])
def test_invalid_line_is_an_error_with_its_number(path, line):
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(InputError, match=r'x\.jsonl: line 2 '):
        read_lines(path)


def test_round_trip_with_nan_as_null(path):
    writer = JsonlWriter(path)
    writer.write({'a': math.nan, 'b': {'c': [1.5, math.inf]}, 'd': 'ü\n"', 'e': None})
    writer.write({'a': 2})
    assert read_lines(path) == ([{'a': None, 'b': {'c': [1.5, None]}, 'd': 'ü\n"', 'e': None}, {'a': 2}], False)
    assert path.read_text().count('\n') == 2


def test_incomplete_line_of_a_killed_attempt_is_removed(path):
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    JsonlWriter(path).write({'a': 3})
    assert [line['a'] for line in read_lines(path).lines] == [1, 3]


def test_concurrent_writes_do_not_mix_lines(path):
    writer = JsonlWriter(path)
    threads = [
        threading.Thread(target=lambda: [writer.write({'a': number, 'text': 'x' * 500}) for number in range(50)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_lines(path).lines) == 400


@pytest.fixture
def warnings(monkeypatch):
    records = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, 'emit', lambda record: records.append(record.getMessage()))
    monkeypatch.setattr(logger, 'handlers', [handler])
    return records


def test_full_disk_is_reported_once_and_the_next_line_is_complete(path, warnings, monkeypatch):
    writer = JsonlWriter(path)
    writer.write({'a': 1})
    write = lines_module.os.write

    def half(descriptor, content):
        return write(descriptor, content[: len(content) // 2])

    monkeypatch.setattr(lines_module.os, 'write', half)
    writer.write({'a': 2})
    writer.write({'a': 3})
    assert warnings == ['x.jsonl: cannot be written (No space left on device); training continues']
    monkeypatch.undo()
    writer.write({'a': 4})
    assert [line['a'] for line in read_lines(path).lines] == [1, 4]


def test_missing_directory_is_a_warning(tmp_path, warnings):
    writer = JsonlWriter(tmp_path / 'gone' / 'x.jsonl')
    writer.write({'a': 1})
    writer.write({'a': 2})
    writer.replace([{'a': 3}])
    assert len(warnings) == 2
    # Control: lines are written once the directory exists.
    (tmp_path / 'gone').mkdir()
    writer.write({'a': 4})
    assert read_lines(tmp_path / 'gone' / 'x.jsonl').lines == [{'a': 4}]


def test_file_is_replaced_atomically(path):
    writer = JsonlWriter(path)
    for number in range(3):
        writer.write({'a': number})
    writer.replace([{'a': 7, 'b': math.nan}])
    writer.write({'a': 8})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{'a': 7, 'b': None}, {'a': 8}]
    assert [entry.name for entry in path.parent.iterdir()] == ['x.jsonl']
