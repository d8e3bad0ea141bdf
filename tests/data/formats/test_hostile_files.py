"""Tests that damaged and hostile files yield a result or a one-line error in bounded memory.

This must hold with and without --skip-bad-records.
"""

import gzip
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from maxlm.data.chat.setup import make_chat_recipe
from maxlm.data.dataset.records import load_manifest
from maxlm.data.dataset.remote_manifest import parse_manifest
from maxlm.data.documents.document import raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.filters.report import CleaningReport
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.data.formats.record_formats import find_format
from maxlm.data.prepare.summary import summary
from maxlm.data.prepare.task_results import load_result
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer
from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json

CHAT = {'messages': [{'role': 'user', 'content': 'q ü'}, {'role': 'assistant', 'content': 'a'}], 'tools': [{'n': 1}]}
RECORDS = [
    CHAT,
    {'text': 'größe', 'id': 3},
    {'conversations': [{'from': 'human', 'value': 'q'}, {'from': 'gpt', 'value': 'a'}], 'system': 's'},
    {'instruction': 'i', 'input': 'x', 'output': 'o'},
    {'prompt': 'p', 'completion': 'c'},
    {'prompt': CHAT['messages'][:1], 'completion': CHAT['messages'][1:]},
    {'prompt': 'q', 'chosen': 'b', 'rejected': 'c'},
]
LINES = '\n'.join(json.dumps(record, ensure_ascii=False) for record in RECORDS).encode()
OPTIONS = [
    ReadOptions(format=name, messages_field=field, roles=(('human', 'user'),), end_of_document=3, token_dtype='uint16')
    for name in ('text', 'auto', 'chat', 'preference')
    for field in ('', 'messages')
]


def saved(save, *arrays, **named):
    stream = io.BytesIO()
    save(stream, *arrays, **named)
    return stream.getvalue()


def parquet():
    return saved(lambda stream: pq.write_table(pa.Table.from_pylist([CHAT, {'text': 'größe'}]), stream))


FILES = {
    'x.txt': 'größe\n'.encode(),
    'x.log': 'größe\n'.encode(),
    'x.txt.gz': gzip.compress(b'text' * 50, mtime=0),
    'x.zst': zstandard.compress(b'text' * 50),
    'x.jsonl': LINES,
    'x.jsonl.gz': gzip.compress(LINES, mtime=0),
    'x.jsonl.zst': zstandard.compress(LINES),
    'x.npy': saved(np.save, np.arange(20, dtype=np.uint16)),
    'rows.npy': saved(np.save, np.arange(20, dtype=np.int32).reshape(4, 5)),
    'x.npz': saved(np.savez_compressed, doc_0=np.arange(20, dtype=np.uint16), doc_1=np.arange(6, dtype=np.uint16)),
    'masked.npz': saved(
        np.savez, input_ids=np.arange(20).reshape(4, 5), attention_mask=np.ones((4, 5), bool), length=[5] * 4
    ),
    'x.bin': np.arange(20, dtype='<u2').tobytes(),
    'x.parquet': parquet(),
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(['\ud800', '../x']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
) | st.sampled_from([10**30, -7, 10**9, 1e308, float('nan'), True, 'x' * 10_000])


def mutated(draw, content):
    """Returns the content with a few bytes changed, removed or inserted."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 3))
        if kind == 0 and place < len(data):
            data[place] ^= draw(st.integers(1, 255))
        elif kind == 1:
            del data[place : place + draw(st.integers(1, 40))]
        elif kind == 2:
            data[place:place] = draw(st.binary(max_size=8))
        else:
            del data[place:]
    return bytes(data)


def replaced(draw, value):
    """Returns the JSON value with one nested value replaced, removed or wrapped deeply."""
    path, node = [], value
    while isinstance(node, dict | list) and node and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        path.append((node, key))
        node = node[key]
    new = draw(JSON_VALUES)
    if not path:
        return new
    parent, key = path[-1]
    if isinstance(parent, dict) and draw(st.booleans()) and draw(st.booleans()):
        del parent[key]
    else:
        parent[key] = new
    return value


def result_or_one_line(call):
    """Returns the result of `call`, or None if it raises an InputError of one line."""
    try:
        return call()
    except InputError as error:
        message = str(error)
    assert '\n' not in message.strip(), message
    assert len(message) < 2000
    return None


def read_all(name, content, options):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(content)
        files = result_or_one_line(lambda: find_inputs([directory])) or find_inputs([path])
        result_or_one_line(lambda: find_format('auto', files, text_key='text'))

        def read(on_bad):
            return [
                document
                for file in files
                for file_range in split_file(file, 64)
                for document in read_documents(file_range, options, on_bad)
            ]

        bad = []
        documents = read(lambda name, reason: bad.append((name, reason)))
        assert all('\n' not in reason for _, reason in bad), bad
        strict = result_or_one_line(lambda: read(raise_bad))
        # A defect is reported in both modes or in neither.
        assert (strict is None) == bool(bad)
        for document in documents:
            document.text.encode()
        return documents


@pytest.mark.parametrize('name', FILES)
def test_intact_files_are_read(name):
    assert read_all(name, FILES[name], OPTIONS[2])


@pytest.mark.parametrize('name', FILES)
@given(data=st.data())
def test_damaged_files(name, data):
    read_all(name, mutated(data.draw, FILES[name]), data.draw(st.sampled_from(OPTIONS)))


@given(data=st.data())
def test_records_with_other_values(data):
    record = replaced(data.draw, parse_json(json.dumps(data.draw(st.sampled_from(RECORDS)))))
    read_all('x.jsonl', json.dumps(record).encode(), data.draw(st.sampled_from(OPTIONS)))


@pytest.mark.parametrize(
    'record',
    [
        {'messages': [{'role': 'x' * 10_000, 'content': 'q'}]},
        {'conversations': [{'from': [], 'value': 'q'}]},
        {'conversations': [{'from': 'x' * 10_000, 'value': 'q'}]},
        {'a\nb': 1},
    ],
)
def test_records_with_values_that_messages_quote(record):
    assert read_all('x.jsonl', json.dumps(record).encode(), OPTIONS[2]) == []


DEEP = [b'[' * 100_000, b'{"a":' * 5000 + b'1' + b'}' * 5000, b'[' * 200 + b']' * 200]


@pytest.fixture(scope='module')
def data_set(tmp_path_factory):
    """Returns a prepared data set and a function that reads each of its JSON files."""
    from tests.preparing import run

    path = tmp_path_factory.mktemp('hostile')
    (path / 'x.jsonl').write_text('\n'.join(json.dumps(CHAT) for _ in range(4)))
    arguments = ['--input', path / 'x.jsonl', '--tokenizer', 'bytes', '--deduplicate', 'exact', '--workers', 1]
    assert run(*arguments, '--quiet', '--output', path / 'data') == 0
    (path / 'data' / 'tokenizer_config.json').write_text(json.dumps({'bos_token': {'content': '<s>'}}))
    (path / 'data' / 'result.json').write_text(json.dumps({'identity': 'x', 'facts': [1]}))
    return path / 'data'


def read_report(path):
    try:
        CleaningReport.from_json(path.read_text()).to_lines()
    except (LookupError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return


def read_tokenizer(path):
    tokenizer = Tokenizer.load(path)
    tokenizer.encode_batch(['größe'])
    return tokenizer


JSON_FILES = {
    'dataset.json': lambda path: summary(load_manifest(path.parent), '', cleaned=True),
    'remote': lambda path: parse_manifest('gs://bucket/x', (path.parent / 'dataset.json').read_bytes()),
    'tokenizer.json': read_tokenizer,
    'tokenizer_config.json': lambda path: make_chat_recipe(
        '', tokenizer=str(path.parent / 'tokenizer.json'), special_tokens=[], window=0
    ),
    'cleaning.json': read_report,
    'result.json': lambda path: load_result(path, 'x'),
}


def json_file(data_set, name):
    return data_set / ('dataset.json' if name == 'remote' else name)


@pytest.mark.parametrize('name', JSON_FILES)
def test_intact_json_files_are_read(data_set, name):
    result = result_or_one_line(lambda: JSON_FILES[name](json_file(data_set, name)))
    assert result is not None or name == 'cleaning.json'


@pytest.mark.parametrize('name', JSON_FILES)
@given(data=st.data())
def test_json_files(data_set, name, data):
    path, draw = json_file(data_set, name), data.draw
    original = path.read_bytes()
    if draw(st.booleans()):
        content = json.dumps(replaced(draw, json.loads(original))).encode()
    else:
        content = draw(st.sampled_from(DEEP)) if not draw(st.integers(0, 5)) else mutated(draw, original)
    path.write_bytes(content)
    try:
        result_or_one_line(lambda: JSON_FILES[name](path))
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        *[(key, value) for key in ('vocab_size', 'end_of_document', 'block') for value in (-7, True, 1.5, '1', 10**30)],
        ('tokenizer_file', '../../etc/hostname'),
        ('tokenizer_file', '/etc/hostname'),
        ('tokenizer_file', 'x' * 10_000),
        ('chat', {'train': {}, 'validation': {}}),
        ('chat', {'train': dict.fromkeys(('predicted', 'padding', 'shortened', 'left_out'), 0)}),
        ('chat', 3),
        ('left_out', [{'name': 3}]),
    ],
)
def test_values_of_a_manifest_that_are_out_of_range(data_set, key, value):
    path = data_set / 'dataset.json'
    original = path.read_bytes()
    path.write_text(json.dumps({**json.loads(original), key: value}))
    try:
        with pytest.raises(InputError, match=r'dataset\.json is malformed') as info:
            load_manifest(data_set)
    finally:
        path.write_bytes(original)
    assert len(str(info.value)) < 1000
    assert 'delete' not in str(info.value)
    assert '/etc' not in str(info.value).partition('; ')[2]
    load_manifest(data_set)


def with_id(facts, value, *, added):
    if added:
        facts['added_tokens'][0]['id'] = value
    else:
        facts['model']['vocab'][next(iter(facts['model']['vocab']))] = value
    return json.dumps(facts)


@pytest.mark.parametrize('added', [False, True])
def test_ids_with_large_gaps_are_rejected(added):
    with pytest.raises(InputError, match=r'x: has .* tokens with ids up to 1,000,000,000: the gaps are too large'):
        Tokenizer.from_json(with_id(json.loads(bytes_tokenizer().to_json()), 10**9, added=added), name='x')
    # Small gaps between ids are common.
    assert Tokenizer.from_json(with_id(json.loads(bytes_tokenizer().to_json()), 999, added=False), name='x')


def npy(header, data=b''):
    header += b' ' * (-(len(header) + 13) % 64) + b'\n'
    return b'\x93NUMPY\x02\x00' + len(header).to_bytes(4, 'little') + header + data


HEADER = b"{'descr': '<u2', 'fortran_order': False, 'shape': (%s), }"


@pytest.mark.parametrize(
    'content',
    [
        npy(b'[' * 4000),
        npy(HEADER % (b'-' * 9000 + b'1,')),
        npy(HEADER % b'-1, -1', b'\0\0'),
        b'\x93NUMPY\x02\x00' + b'\xff' * 4 + b'x' * 20_000,
    ],
)
def test_hostile_array_headers_are_one_line_errors(tmp_path, content):
    (tmp_path / 'x.npy').write_bytes(content)
    assert read_all('x.npy', content, ReadOptions()) == []


def test_a_header_of_python_2_is_read():
    content = npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (2L,), }", b'\5\0\6\0')
    (document,) = read_all('x.npy', content, ReadOptions())
    assert document.tokens.tolist() == [5, 6]


def test_rows_without_tokens_take_no_time():
    assert read_all('x.npy', npy(HEADER % b'1000000000000, 0'), ReadOptions()) == []
