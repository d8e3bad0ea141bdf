"""Tests that files that decode to more than the available memory are read in bounded memory."""

import ast
import gzip
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats import compression, jsonl, parquet, text
from maxlm.data.formats.discovery import find_inputs

READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
from maxlm.data.formats import compression, parquet
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import split_file
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.file_ranges import read_documents
assert 'jax' not in sys.modules
parquet.MIN_LIMIT_BYTES = compression.MIN_LIMIT_BYTES = 2**40
bad = []
for file in find_inputs(sys.argv[2:]):
    for file_range in split_file(file, 2**20):
        options = ReadOptions(max_record_bytes=2**20)
        for document in read_documents(file_range, options, lambda name, reason: bad.append((name, reason))):
            bad.append((document.name, len(document.text)))
print(bad)
"""


def read_limited(limit, *paths):
    """Reads files in a process with an address space of `limit` bytes; returns its result."""
    # Arrow's default allocator reserves more address space than it uses.
    environment = {**os.environ, 'ARROW_DEFAULT_MEMORY_POOL': 'system', 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-c', READ, str(limit), *paths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.multiprocess
def test_compression_bombs_take_bounded_memory(tmp_path):
    """Reads files that decompress to more than the available memory."""
    block = zstandard.ZstdCompressor(level=1)
    with block.stream_writer((tmp_path / 'a.jsonl.zst').open('wb')) as stream:
        stream.write(b'{"text": "fine"}\n{"text": "')
        for _ in range(1024):
            stream.write(b'a' * 2**20)
        stream.write(b'"}\n{"text": "fine"}\n')
    (tmp_path / 'b.txt.zst').write_bytes((tmp_path / 'a.jsonl.zst').read_bytes())
    found = read_limited(3 * 2**28, tmp_path / 'a.jsonl.zst', tmp_path / 'b.txt.zst')
    assert [name for name, _ in found] == [
        'a.jsonl.zst:0',
        'a.jsonl.zst:2',
        f'a.jsonl.zst:{17 + 12 + 2**30 + 1}',
        'b.txt.zst',
    ]
    assert all(
        'longer than 1 MiB, the limit for a record; raise --max-record-mib' in found[place][1] for place in (1, 3)
    )


@pytest.mark.parametrize('line', [b'\n', b'{"text": "fine"}\n', b'a'])
def test_a_file_of_repeated_lines_is_refused(tmp_path, monkeypatch, line):
    content = line * (2**22 // len(line))
    for name in ('a.jsonl.zst', 'b.txt.zst', 'c.jsonl.gz'):
        is_gzip = name.endswith('gz')
        (tmp_path / name).write_bytes(gzip.compress(content) if is_gzip else zstandard.compress(content))
    files = {file.name: file for file in find_inputs([tmp_path])}
    options, bad = ReadOptions(max_record_bytes=2**24), []

    def read(reader, name):
        bad.clear()
        return sum(1 for _ in reader.read(files[name], 0, 2**40, options, lambda *found: bad.append(found)))

    monkeypatch.setattr(compression, 'MIN_LIMIT_BYTES', 2**19)
    for reader, name in ((jsonl, 'a.jsonl.zst'), (text, 'b.txt.zst')):
        assert read(reader, name) < 2**21 // len(line)
        assert 'the content has more than 2,000 times the size of the file' in bad[0][1]
    # Control: gzip cannot expand as much, and smaller contents may have any factor.
    read(jsonl, 'c.jsonl.gz')
    assert not any('times the size' in reason for _, reason in bad)
    monkeypatch.setattr(compression, 'MIN_LIMIT_BYTES', 2**24)
    assert read(text, 'b.txt.zst') == 1
    assert not bad


@pytest.mark.parametrize('kind', ['dictionary', 'text', 'null', 'struct'])
def test_a_parquet_file_of_repeated_rows_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(parquet, 'MIN_LIMIT_BYTES', 2**22)
    # Each decodes to much more than 4 MiB.
    texts = {
        'dictionary': pa.DictionaryArray.from_arrays(pa.array([0] * 40_000, pa.int32()), pa.array(['ab ' * 2000])),
        'text': pa.array(['ab ' * 500] * 40_000),
        'null': pa.array([None] * 100_000, pa.string()),
        'struct': pa.array([{'text': 'ab ' * 500}] * 40_000),
    }[kind]
    options = {'compression': 'zstd', 'row_group_size': 20_000, 'write_statistics': False}
    pq.write_table(pa.table({'text': texts}), tmp_path / 'x.parquet', **options)
    (file,) = find_inputs([tmp_path])
    assert file.size < 4000
    options, bad = ReadOptions(text_key='text.text' if kind == 'struct' else 'text'), []
    documents = list(parquet.read(file, 0, 9, options, lambda *found: bad.append(found)))
    # All row groups after the limit are refused too.
    assert all('bytes contains more than ' in reason and 'bytes of text, the limit' in reason for _, reason in bad)
    assert [name for name, _ in bad][-1] == f'x.parquet:{20_000 * (len(texts) // 20_000 - 1)}'
    assert sum(len(document.text) for document in documents) <= 2**23
    monkeypatch.setattr(parquet, 'MIN_LIMIT_BYTES', 2**30)
    # Negative control: without the limit, all rows are read.
    bad.clear()
    documents = list(parquet.read(file, 0, 9, options, lambda *found: bad.append(found)))
    assert (len(documents), bad) == (len(texts), [])


@pytest.mark.multiprocess
def test_parquet_bombs_take_bounded_memory(tmp_path):
    """Reads a text that a dictionary repeats to 1 GiB in a batch, and a page of 320 MiB."""
    repeated = pa.DictionaryArray.from_arrays(np.zeros(130, np.int32), ['a' * 2**23])
    pq.write_table(pa.table({'text': repeated}), tmp_path / 'a.parquet', compression='zstd')
    size, rows = 2**20, 320
    texts = pa.Array.from_buffers(
        pa.string(),
        rows,
        [None, pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * size), pa.py_buffer(bytes(size * rows))],
    )
    pq.write_table(
        pa.table({'text': texts}),
        tmp_path / 'b.parquet',
        compression='zstd',
        use_dictionary=False,
        data_page_size=2**30,
        write_statistics=False,
    )
    found = read_limited(2**30, tmp_path / 'a.parquet', tmp_path / 'b.parquet')
    # Each of these records exceeds the record limit of the process.
    assert [name for name, _ in found[:130]] == [f'a.parquet:{row}' for row in range(130)]
    assert all('longer than 1 MiB, the limit for a record' in reason for _, reason in found[:130])
    ((name, reason),) = found[130:]
    assert name == 'b.parquet:0'
    assert "a page of the column 'text' has 335,54" in reason
    assert 'bytes, more than the limit of 134,217,728; raise --max-record-mib' in reason
