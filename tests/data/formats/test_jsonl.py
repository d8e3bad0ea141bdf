import dataclasses
import gzip
import json

import pytest
import zstandard

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats import jsonl, record_formats
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import FileRange, read_documents, split_file
from maxlm.errors import InputError
from maxlm.storage import filesystem
from maxlm.storage.errors import classify_error
from tests.messages import input_error

LINES = [json.dumps({'text': f'{i} ü\u2028' * (i % 7 + 1), 'id': i}, ensure_ascii=i % 2 == 0) for i in range(40)]
LINES[11:13] = ['', ' \t', json.dumps({'text': ''}), json.dumps({'text': 'x' * 5000})]


@pytest.mark.parametrize('newline', ['\n', '\r\n'])
@pytest.mark.parametrize('last', ['', '\n', '\n\n\n'])
@pytest.mark.parametrize('mark', ['', '\ufeff'])
def test_ranges_give_all_documents(tmp_path, check_ranges, newline, last, mark):
    (tmp_path / 'x.jsonl').write_bytes((mark + newline.join(LINES) + last).encode())
    check_ranges(tmp_path / 'x.jsonl', [300, 1000, 2**20])


def test_ranges_of_a_few_bytes_give_all_documents(tmp_path, check_ranges):
    (tmp_path / 'x.jsonl').write_bytes('\r\n'.join(LINES).encode())
    check_ranges(tmp_path / 'x.jsonl', [1, 7, 64])


def test_documents_are_named_by_byte_and_keep_scalars(tmp_path, read):
    lines = [
        {'text': 'one', 'id': 'a', 'n': None, 'list': [1], 'object': {}},
        {'text': ''},
        {'text': 'zwei ü\n', 'id': 3},
    ]
    lines = [json.dumps(line, ensure_ascii=False) for line in lines]
    (tmp_path / 'web').mkdir()
    (tmp_path / 'web' / 'x.jsonl').write_bytes('\n'.join(lines).encode())
    documents = read(tmp_path / 'web')
    last = len(f'{lines[0]}\n{lines[1]}\n')
    assert [(d.name, d.source, d.text) for d in documents] == [
        ('x.jsonl:0', 'web', 'one'),
        (f'x.jsonl:{last}', 'web', 'zwei ü\n'),
    ]
    assert [d.metadata for d in documents] == [{'id': 'a', 'n': None}, {'id': 3}]


def test_text_key(tmp_path, read):
    (tmp_path / 'x.jsonl').write_text('{"text": "no", "content": "yes"}')
    (document,) = read(tmp_path / 'x.jsonl', text_key='content')
    assert (document.text, document.metadata) == ('yes', {'text': 'no'})


@pytest.mark.parametrize(
    ('name', 'compress'),
    [
        ('x.jsonl.gz', gzip.compress),
        # Files with several members or frames are one stream.
        ('x.ndjson.gz', lambda data: gzip.compress(data[:70]) + gzip.compress(data[70:])),
        ('x.jsonl.zst', zstandard.compress),
        ('x.JSONL.ZST', lambda data: zstandard.compress(data[:70]) + zstandard.compress(data[70:])),
        ('x.jsonl.zst', lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data)),
    ],
)
def test_compressed_files_give_the_same_documents(tmp_path, read, name, compress):
    (tmp_path / 'plain.jsonl').write_text('\n'.join(LINES))
    (tmp_path / name).write_bytes(compress('\n'.join(LINES).encode()))
    expected = [(d.name.partition(':')[2], d.text) for d in read(tmp_path / 'plain.jsonl')]
    assert [(d.name.partition(':')[2], d.text) for d in read(tmp_path / name)] == expected
    assert len(split_file(find_inputs([tmp_path / name])[0], 1)) == 1


@pytest.mark.parametrize('suffix', ['gz', 'zst'])
def test_truncated_or_damaged_compression_is_an_error_at_any_byte(tmp_path, bad_records, read, suffix):
    data = '\n'.join(LINES).encode()
    compressed = gzip.compress(data) if suffix == 'gz' else zstandard.ZstdCompressor(write_checksum=True).compress(data)
    path = tmp_path / f'x.jsonl.{suffix}'
    path.write_bytes(compressed)
    assert bad_records(path) == []
    expected = read(path)
    for size in (1, 5, 17, len(compressed) // 2, len(compressed) - 5, len(compressed) - 1):
        path.write_bytes(compressed[:size])
        bad = bad_records(path)
        assert len([name for name, _ in bad if name == path.name]) == 1, size
        assert 'damaged or truncated' in bad[-1][1]
        assert path.name in bad[-1][1]
        assert len(read(path, on_bad=lambda *_: None)) <= len(expected)
    path.write_bytes(compressed[:40] + bytes([compressed[40] ^ 255]) + compressed[41:])
    assert any('damaged' in reason for _, reason in bad_records(path))


@pytest.mark.parametrize(
    ('content', 'parts'),
    [
        (b'{"text": "a"}\n{"text": "\xff"}', ['x.jsonl:2', 'byte 24']),
        (b'\n\xef\xbb\xbf{"text": "a"}', ['x.jsonl:2', 'BOM']),
        (b'\xef\xbb\xbf{"text": "\xff"}', ['x.jsonl:1', 'byte 13']),
        ('{"text": "a"}\n{"text": ', ['x.jsonl:2', 'not JSON', '{"text": "…"}']),
        ('{"content": "a"}', ['x.jsonl:1', "'text'", '--text-field']),
        ('{"text": 3}', ['x.jsonl:1', "'text'"]),
        ('["text"]', ['x.jsonl:1', "'text'"]),
        ('{"text": "\\ud800"}', ['x.jsonl:1', 'surrogate']),
        ('[' * 100_000, ['x.jsonl:1', 'not JSON']),
        ('9' * 5000, ['x.jsonl:1', 'not JSON']),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path, read, bad_records, content, parts):
    (tmp_path / 'x.jsonl').write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / 'good.txt').write_text('good')
    with input_error(*parts):
        read(tmp_path)
    ((name, _),) = bad_records(tmp_path)
    assert name == parts[0]
    assert 'good' in [d.text for d in read(tmp_path, on_bad=lambda *_: None)]


def test_bad_lines_of_ranges_have_line_numbers_of_the_file(tmp_path, monkeypatch):
    lines = [*LINES[:20], 'bad', *LINES[20:30], '{}', *LINES[30:]]
    (tmp_path / 'x.jsonl').write_text('\r\n'.join(lines))
    (file,) = find_inputs([tmp_path / 'x.jsonl'])
    bad, counted = [], []
    count_lines = jsonl._count_lines
    monkeypatch.setattr(jsonl, '_count_lines', lambda *args: counted.append(args) or count_lines(*args))
    for target in (1, 50, 300, 2**20):
        for file_range in split_file(file, target):
            list(read_documents(file_range, ReadOptions(), lambda *args: bad.append(args)))
        assert [name for name, _ in bad] == ['x.jsonl:21', 'x.jsonl:32']
        # Only ranges with errors report them.
        assert len(counted) <= 2
        bad.clear()
        counted.clear()


def test_a_line_longer_than_many_ranges_is_read_once(tmp_path, monkeypatch, check_ranges):
    monkeypatch.setattr(jsonl, 'CHUNK_BYTES', 16)
    lines = [json.dumps({'text': text}) for text in ('a', 'b' * 10_000, 'c')]
    (tmp_path / 'x.jsonl').write_text('\n'.join(lines))
    check_ranges(tmp_path / 'x.jsonl', [13, 100, 9000])


def test_a_file_truncated_after_discovery_is_named(tmp_path):
    (tmp_path / 'x.jsonl').write_text('\n'.join(LINES))
    (file,) = find_inputs([tmp_path / 'x.jsonl'])
    (tmp_path / 'x.jsonl').write_text('\n'.join(LINES[:3]) + '\n')
    with pytest.raises(InputError, match=rf'x\.jsonl: ends at byte \d+ of {file.size}'):
        list(read_documents(FileRange(file, 0, 0, file.size), ReadOptions()))


def test_a_storage_error_while_reading_is_named(tmp_path, monkeypatch, bad_records):
    (tmp_path / 'x.jsonl').write_text('\n'.join(LINES))

    def fail(self, buffer):
        raise classify_error(str(tmp_path / 'x.jsonl'), OSError(5, 'Input/output error'))

    monkeypatch.setattr(filesystem._LocalFile, 'readinto', fail)
    assert bad_records(tmp_path / 'x.jsonl') == [('x.jsonl', f'{tmp_path}/x.jsonl: Input/output error')]


PAIR = {'prompt': 'q', 'chosen': 'b', 'rejected': 'c'}
CHAT = {'messages': [{'role': 'user', 'content': 'q ü'}, {'role': 'assistant', 'content': 'a'}], 'id': 3}


@pytest.mark.parametrize('name', ['x.jsonl', 'x.jsonl.gz'])
@pytest.mark.parametrize(
    ('first', 'shown', 'found'),
    [
        (CHAT, 'chat', 'auto'),
        ({'text': 'a'}, 'text', 'text'),
        ({**CHAT, 'text': 'a'}, 'text', 'text'),
        ({**CHAT, **PAIR}, 'preference', 'preference'),
        ({**PAIR, 'text': 'a'}, 'text', 'text'),
        ({'chosen': 'b'}, 'text', 'text'),
    ],
)
def test_the_first_line_determines_the_format(tmp_path, name, first, shown, found):
    content = ('\ufeff\n \n' + json.dumps(first) + '\n' + json.dumps(CHAT)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith('gz') else content)
    (file,) = find_inputs([tmp_path / name])
    assert jsonl.first_format(file, ReadOptions()) == shown
    assert record_formats.find_format('auto', [file], text_key='text') == found
    assert record_formats.find_format('text', [file], text_key='text') == 'text'


# mtime=0 makes the test id equal in all processes.
TRUNCATED = gzip.compress(json.dumps(CHAT).encode(), mtime=0)[:20]


@pytest.mark.parametrize('content', [b'', b'{', b'\xff', b'3', TRUNCATED])
def test_a_damaged_first_line_is_not_a_conversation(tmp_path, content):
    (tmp_path / 'x.jsonl').write_bytes(content)
    (tmp_path / 'x.jsonl.gz').write_bytes(content)
    for file in find_inputs([tmp_path / 'x.jsonl', tmp_path / 'x.jsonl.gz']):
        assert jsonl.first_format(file, ReadOptions()) == 'text'
    (tmp_path / 'x.jsonl').unlink()
    with pytest.raises(InputError, match=r'x\.jsonl: (?i:no such file)'):
        record_formats.find_format('auto', [dataclasses.replace(file, path=str(tmp_path / 'x.jsonl'))], text_key='text')


def test_conversations_are_documents(tmp_path, read):
    lines = [CHAT, {'text': 'plain', 'messages': []}, {'instruction': 'i', 'output': 'o'}]
    (tmp_path / 'x.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    chat, plain, alpaca = read(tmp_path / 'x.jsonl', format='auto')
    assert (chat.text, chat.metadata, len(chat.conversation.messages)) == ('q ü\n\na', {'id': 3}, 2)
    assert (plain.text, plain.conversation) == ('plain', None)
    assert alpaca.conversation.learned == (False, True)
    with pytest.raises(InputError, match=r'x\.jsonl:2: no assistant message to train on'):
        read(tmp_path / 'x.jsonl', format='chat')
    with pytest.raises(InputError, match=r'x\.jsonl:1: no text at the key .text.; it has .*; use --format=chat'):
        read(tmp_path / 'x.jsonl')
    (tmp_path / 'x.jsonl').write_text('{"messages": [{"role": "bot"}]}')
    with pytest.raises(InputError, match=r"x\.jsonl:1: message 0 of 'messages' has the role 'bot'"):
        read(tmp_path / 'x.jsonl', format='auto')


@pytest.mark.parametrize(('value', 'kind'), [('null', 'null'), ('5', 'int'), ('["a"]', 'list')])
def test_a_text_of_another_type_is_named(tmp_path, bad_records, value, kind):
    path = tmp_path / 'x.jsonl'
    path.write_text(f'{{"text": "a"}}\n{{"text": {value}, "body": "b"}}\n')
    message = f"the key 'text' contains {kind}, not text; set --text-field to the text field"
    assert bad_records(path) == [('x.jsonl:2', f'{path}:2: {message}')]
