import datetime
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxlm.data.formats import parquet, parquet_pages
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import split_file

TEXTS = [f'{i} ü\n' * (i % 9) if i % 5 else None for i in range(300)]


def write(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_ranges_give_all_documents(tmp_path, check_ranges, read):
    path = write(tmp_path / 'x.parquet', {'id': list(range(300)), 'text': TEXTS}, row_group_size=37)
    check_ranges(path, [1, 400, 2000, 2**30])
    expected = [(f'x.parquet:{i}', text) for i, text in enumerate(TEXTS) if text]
    assert [(d.name, d.text) for d in read(path)] == expected
    assert len(split_file(find_inputs([path])[0], 1)) == 9


@pytest.mark.parametrize('kind', [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize('compression', ['none', 'zstd', 'snappy', 'gzip'])
def test_types_and_compressions_of_text(tmp_path, read, kind, compression):
    column = pa.array(['a', None, '', 'ü']).cast(pa.string()).cast(kind) if not pa.types.is_dictionary(kind) else None
    column = column if column is not None else pa.array(['a', None, '', 'ü']).dictionary_encode()
    path = write(tmp_path / 'x.parquet', {'text': column}, compression=compression)
    assert [(d.name, d.text) for d in read(path)] == [('x.parquet:0', 'a'), ('x.parquet:3', 'ü')]


def test_row_groups_without_rows(tmp_path, read, bad_records):
    # Spark writes such a file for each empty partition.
    empty = write(tmp_path / 'a.parquet', {'text': pa.array([], pa.string())})
    assert pq.ParquetFile(empty).num_row_groups == 1
    assert bad_records(empty) == []
    with pq.ParquetWriter(tmp_path / 'b.parquet', pa.schema({'text': pa.string()})) as writer:
        for texts in (['a'], [], ['b', 'c'], []):
            writer.write_table(pa.table({'text': pa.array(texts, pa.string())}))
    assert [(d.name, d.text) for d in read(tmp_path)] == [
        ('b.parquet:0', 'a'),
        ('b.parquet:1', 'b'),
        ('b.parquet:2', 'c'),
    ]


def test_a_column_name_that_occurs_twice(tmp_path, read, bad_records):
    columns = [pa.array(['a']), pa.array(['b']), pa.array(['c']), pa.array([1]), pa.array([2])]
    path = tmp_path / 'x.parquet'
    pq.write_table(pa.Table.from_arrays(columns, names=['text', 'text', 'body', 'id', 'id']), path)
    message = "2 columns are named 'text'; rename or remove all but one"
    assert bad_records(path) == [('x.parquet', f'{path}: {message}')]
    assert [document.text for document in read(path, text_key='body')] == ['c']
    assert bad_records(path, text_key='body', metadata_keys=('id',))[0][1].endswith(message.replace('text', 'id'))


def test_only_requested_columns_are_kept(tmp_path, read):
    day = datetime.date(2024, 2, 3)
    path = write(tmp_path / 'x.parquet', {'body': ['a'], 'url': ['b'], 'day': [day], 'n': [[1]], 'raw': [b'\xff']})
    (document,) = read(path, text_key='body')
    assert (document.text, document.metadata) == ('a', {})
    (document,) = read(path, text_key='body', metadata_keys=('url', 'day', 'n', 'raw', 'body'))
    assert document.metadata == {'url': 'b', 'day': '2024-02-03', 'n': [1], 'raw': '\ufffd', 'body': 'a'}


@pytest.mark.parametrize(
    ('columns', 'options', 'message'),
    [
        ({'id': [1], 'content': ['a']}, {}, "no column 'text'; it has id, content; set --text-field to the column"),
        (
            {'text': ['a']},
            {'metadata_keys': ('url',)},
            "no column 'url'; it has text; set --metadata-fields to the column",
        ),
        ({'text': [1]}, {}, "the column 'text' contains int64, not text; set --text-field to the text column"),
        ({'text': [['a']]}, {}, "the column 'text' contains list<"),
    ],
)
def test_missing_and_wrong_columns_are_named(tmp_path, bad_records, columns, options, message):
    path = write(tmp_path / 'x.parquet', columns)
    ((name, reason),) = bad_records(path, **options)
    assert name == 'x.parquet'
    assert reason.startswith(f'{path}: {message}')


def test_rows_that_are_not_text_are_named(tmp_path, bad_records, read):
    raw = pa.array([b'good', b'a\xff', b'fine'])
    for column in (raw, pa.Array.from_buffers(pa.string(), 3, raw.buffers())):
        path = write(tmp_path / 'x.parquet', {'text': column})
        ((name, reason),) = bad_records(path)
        assert name == 'x.parquet:1'
        assert reason.startswith(f'{path}: row 1: byte 1 of ')
        assert [d.text for d in read(path, on_bad=lambda *_: None)] == ['good', 'fine']


def test_truncated_and_damaged_files_are_named(tmp_path, bad_records, read):
    path = write(tmp_path / 'x.parquet', {'text': [text or '' for text in TEXTS]}, row_group_size=100)
    content = path.read_bytes()
    for size in (0, 3, 50, len(content) - 1):
        path.write_bytes(content[:size])
        ((name, reason),) = bad_records(path)
        assert name == 'x.parquet'
        assert f'{path}: not a readable Parquet file (' in reason
    # Only the middle row group is damaged; the other row groups are read.
    group = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(1).column(0)
    start = group.dictionary_page_offset or group.data_page_offset
    path.write_bytes(content[:start] + b'\xff' * 20 + content[start + 20 :])
    ((name, reason),) = bad_records(path)
    assert name == 'x.parquet:100'
    assert 'rows 100 to 199 is damaged' in reason
    rows = {int(d.name.split(':')[1]) // 100 for d in read(path, on_bad=lambda *_: None)}
    assert rows == {0, 2}


def test_pages_larger_than_the_limit_are_named_before_they_are_decoded(tmp_path, bad_records, read, monkeypatch):
    texts = ['a' * 100, 'b' * 5000, 'c' * 100]
    path = write(tmp_path / 'x.parquet', {'text': texts, 'id': [1, 2, 3]}, row_group_size=1, use_dictionary=False)
    monkeypatch.setattr(parquet_pages, 'MAX_PAGE_BYTES', 4000)
    monkeypatch.setattr(parquet, 'MAX_PAGE_BYTES', 4000)
    ((name, reason),) = bad_records(path, max_record_bytes=1)[1:2]
    assert name == 'x.parquet:1'
    assert f'{path}: the row group of rows 1 to 1: a page of the column' in reason
    assert "'text' has 5,0" in reason
    assert 'more than the limit of 4,000; raise --max-record-mib' in reason
    # Columns that are not read do not count, and a larger record raises the limit.
    assert [d.text for d in read(path, max_record_bytes=6000)] == texts
    write(path, {'text': ['a'], 'id': ['b' * 5000]})
    assert [d.text for d in read(path, max_record_bytes=10)] == ['a']


def test_page_sizes_match_the_headers(tmp_path):
    # The file has statistics in page headers, nulls and several pages, in both versions of the format.
    for version in ('1.0', '2.0'):
        path = write(
            tmp_path / 'x.parquet',
            {'text': ['x' * 999, None] * 50, 'rest': [{'a': [f'{i}' * 50]} for i in range(100)]},
            data_page_version=version,
            data_page_size=5000,
            write_batch_size=1,
            compression='none',
            row_group_size=40,
        )
        opened = pq.ParquetFile(path)
        names = [opened.schema.column(index).path for index in range(len(opened.schema))]
        with path.open('rb') as file:
            groups = parquet_pages.column_chunks(file)
            assert len(groups) == opened.metadata.num_row_groups > 1
            for number, chunks in enumerate(groups):
                for column, chunk in enumerate(chunks):
                    wanted = opened.metadata.row_group(number).column(column)
                    assert chunk.start == (wanted.dictionary_page_offset or wanted.data_page_offset)
                    assert len(chunk) == wanted.total_compressed_size
                    sizes = list(parquet_pages._page_sizes(file, chunk))
                    assert len(sizes) > 1
                    # The remaining bytes are headers, which contain the minimum and the maximum of a text column.
                    headers = wanted.total_uncompressed_size - sum(sizes)
                    assert 10 * len(sizes) < headers < 2100 * len(sizes)
                largest = parquet_pages.largest_pages(file, chunks, names, ['text'], 2**30)
                assert largest == max(parquet_pages._page_sizes(file, chunks[0]))


def test_booleans_in_a_header_take_no_memory():
    # Each boolean takes one byte, and a damaged file may contain any number of them.
    assert parquet_pages._Thrift(io.BytesIO(b'\x11' * 1000 + b'\x15\x08\x00')).read_struct() == {1001: 4}


def test_a_footer_that_aborts_pyarrow_is_reported_as_damaged(tmp_path, bad_records, read):
    path = write(tmp_path / 'x.parquet', {'text': ['a' * 50, 'b'] * 50, 'n': list(range(100))})
    content = bytearray(path.read_bytes())
    start = len(content) - 8 - int.from_bytes(content[-8:-4], 'little')
    # Changes the type of the first column from BYTE_ARRAY to BOOLEAN, for which size statistics are invalid.
    assert content[start + 18] == 12
    content[start + 18] = 0
    path.write_bytes(content)
    assert bad_records(path)
    assert list(read(path, on_bad=lambda *_: None)) == []


def test_a_footer_above_the_limit_is_not_read(tmp_path, bad_records):
    path = tmp_path / 'x.parquet'
    with path.open('wb') as file:
        file.truncate(2**40)
        file.seek(0, 2)
        file.write((2**32 - 1).to_bytes(4, 'little') + b'PAR1')
    ((name, reason),) = bad_records(path)
    assert name == 'x.parquet'
    assert 'the footer has 4,294,967,295 bytes, more than the limit of 67,108,864' in reason
