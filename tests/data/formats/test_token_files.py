import io
import itertools
import zipfile

import numpy as np
import pytest

from maxlm.data.documents.document import raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats import token_files
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import FileRange, read_documents, split_file
from maxlm.errors import InputError

END = 0


def documents_of(stream, end, longest):
    """Returns (first token, ids) of each document of a stream by the definition of document starts."""
    starts = {0} | {i + 1 for i, token in enumerate(stream) if token == end}
    starts |= {k for k in range(longest, len(stream), longest) if end not in stream[k - longest : k]}
    bounds = [*sorted(start for start in starts if start < len(stream)), len(stream)]
    cut = [(a, stream[a:b]) for a, b in itertools.pairwise(bounds)]
    cut = [(first, ids[:-1] if ids[-1] == end else ids) for first, ids in cut]
    return [(first, ids) for first, ids in cut if ids]


def read_in_ranges(path, target, **options):
    documents = []
    for file in find_inputs([path]):
        for file_range in split_file(file, target):
            documents += read_documents(file_range, ReadOptions(**options), raise_bad)
    assert all(document.tokens.dtype == np.uint32 for document in documents)
    return [(document.name.split(':', 1)[1], document.tokens.tolist()) for document in documents]


def named(documents, prefix=''):
    return [(f'{prefix}{first}', ids) for first, ids in documents]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(token_files, 'CHUNK_TOKENS', 4)
    monkeypatch.setattr(token_files, 'MAX_DOCUMENT_TOKENS', 16)


# The seeds cover all four integer types.
@pytest.mark.parametrize('seed', [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 20))])
def test_ranges_of_any_size_give_the_documents_of_the_stream(tmp_path, small_chunks, seed):
    rng = np.random.default_rng(seed)
    num_tokens, vocab = int(rng.integers(1, 150)), int(rng.choice([3, 30, 200]))
    stream = rng.integers(0, vocab, num_tokens)
    dtype = ['uint16', '<u4', '>i4', 'int64'][seed % 4]
    np.save(tmp_path / 'x.npy', stream.astype(dtype))
    stream.astype('<u2').tofile(tmp_path / 'x.bin')
    for end in (END, None):
        expected = named(documents_of(stream.tolist(), end, 16))
        for target in (1, 7, 33, 100, 2**20):
            assert read_in_ranges(tmp_path / 'x.npy', target, end_of_document=end) == expected
            assert read_in_ranges(tmp_path / 'x.bin', target, end_of_document=end, token_dtype='uint16') == expected


def test_wrong_ranges_are_detected(tmp_path, small_chunks, check_ranges):
    rng = np.random.default_rng(0)
    np.save(tmp_path / 'x.npy', rng.integers(0, 9, 300).astype('uint16'))
    check_ranges(tmp_path / 'x.npy', [40, 100, 2**20], end_of_document=END)


@pytest.mark.parametrize('shape', [(5, 12), (1, 40), (7, 1), (3, 0)])
def test_rows_are_separate_streams(tmp_path, small_chunks, shape):
    rows = np.random.default_rng(1).integers(0, 5, shape).astype('int32')
    np.save(tmp_path / 'x.npy', rows)
    expected = [
        (str(number * shape[1] + first), ids)
        for number, row in enumerate(rows.tolist())
        for first, ids in (documents_of(row, END, 16) if row else [])
    ]
    for target in (1, 40, 2**20):
        assert read_in_ranges(tmp_path / 'x.npy', target, end_of_document=END) == expected


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_archives_give_every_array_in_order(tmp_path, small_chunks, save):
    rng = np.random.default_rng(2)
    arrays = {
        name: rng.integers(0, 4, shape).astype('uint16') for name, shape in [('doc_2', 50), ('doc_0', 9), ('doc_1', 30)]
    }
    save(tmp_path / 'x.npz', **arrays)
    expected = []
    for name, array in arrays.items():
        rows = array.reshape(-1, array.shape[-1]).tolist()
        for number, row in enumerate(rows):
            expected += [(f'{name}:{number * len(row) + first}', ids) for first, ids in documents_of(row, END, 16)]
    for target in (1, 200, 2**20):
        assert read_in_ranges(tmp_path / 'x.npz', target, end_of_document=END) == expected
    assert [file_range.start for file_range in split_file(find_inputs([tmp_path / 'x.npz'])[0], 1)] == [0, 1, 2]


def test_a_stream_without_end_tokens_is_split_at_the_limit(tmp_path):
    np.save(tmp_path / 'x.npy', np.ones(2**24 + 5, 'uint16'))
    documents = read_in_ranges(tmp_path / 'x.npy', 2**24)
    assert [(name, len(ids)) for name, ids in documents] == [('0', 2**24), (str(2**24), 5)]


@pytest.mark.parametrize(('magic', 'version', 'dtype'), [(20240520, 1, '<u2'), (20240801, 7, '<u4')])
def test_llm_c_files_specify_their_dtype(tmp_path, bad_records, magic, version, dtype):
    header = np.zeros(256, '<i4')
    header[:3] = magic, version, 6
    stream = np.array([7, 8, 50256, 9, 50256, 5], dtype)
    path = tmp_path / 'x.bin'
    path.write_bytes(header.tobytes() + stream.tobytes())
    expected = [('0', [7, 8]), ('3', [9]), ('5', [5])]
    for target in (1, 2, 2**20):
        assert read_in_ranges(path, target, end_of_document=50256) == expected
    other = {'<u2': 'uint32', '<u4': 'uint16'}[dtype]
    ((_, reason),) = bad_records(path, token_dtype=other)
    assert f'not --token-dtype={other}' in reason
    path.write_bytes(header.tobytes() + stream.tobytes()[:-4])
    ((_, reason),) = bad_records(path)
    assert 'x.bin: has ' in reason
    assert 'truncated' in reason
    header[1] = 9
    path.write_bytes(header.tobytes() + stream.tobytes())
    ((_, reason),) = bad_records(path)
    assert 'version 9' in reason


def test_raw_files_need_a_dtype(tmp_path, bad_records):
    path = tmp_path / 'x.bin'
    path.write_bytes(bytes(7))
    assert bad_records(path) == [
        ('x.bin', f'{path}: does not specify its dtype; add --token-dtype=uint16 or --token-dtype=uint32')
    ]
    assert bad_records(path, token_dtype='uint16') == [
        ('x.bin', f'{path}: has 7 bytes, not a multiple of the size of uint16; it was truncated')
    ]


@pytest.mark.parametrize(
    ('stream', 'vocab_size', 'message'),
    [
        ([1, 2, END, 3, 900, 4, END, 5], 900, 'token 4 is 900; ids must be from 0 to 899'),
        ([1, 2, END, 3, -1, 4, END, 5], None, 'token 4 is -1; ids must be from 0 to 4294967295'),
        ([1, 2, END, 3, 2**32, 4, END, 5], None, 'token 4 is 4294967296; ids must be from 0 to 4294967295'),
    ],
)
def test_ids_beyond_the_vocabulary_are_named(tmp_path, read, bad_records, stream, vocab_size, message):
    options = {'vocab_size': vocab_size, 'end_of_document': END}
    np.save(tmp_path / 'x.npy', np.array(stream, 'int64'))
    assert bad_records(tmp_path / 'x.npy', **options) == [('x.npy:3', f'{tmp_path}/x.npy: {message}')]
    rest = read(tmp_path / 'x.npy', on_bad=lambda *_: None, **options)
    assert [(d.name, d.tokens.tolist()) for d in rest] == [('x.npy:0', [1, 2]), ('x.npy:7', [5])]
    np.savez(tmp_path / 'x.npz', a=np.array([[1, 2, 3, 4], [1, 2, stream[4], 4]]))
    ((name, reason),) = bad_records(tmp_path / 'x.npz', **options)
    assert name == 'x.npz:a:4'
    assert f'x.npz, array a.npy: token 6 (row 1) is {stream[4]}' in reason
    good = np.where(np.array(stream) == stream[4], 899, stream)
    np.save(tmp_path / 'x.npy', good)
    assert bad_records(tmp_path / 'x.npy', **options) == []


@pytest.mark.parametrize(
    ('array', 'message'),
    [
        (np.array([1, None]), 'never unpickled'),
        (np.array([1.5]), 'contains float64; token ids must be integers'),
        (np.zeros((2, 2, 2), 'uint16'), '3 dimensions'),
        (np.zeros((), 'uint16'), '0 dimensions'),
        (np.asfortranarray(np.zeros((2, 3), 'uint16')), 'column-major'),
        (np.zeros(3, [('id', 'uint16')]), 'token ids must be integers'),
    ],
)
def test_arrays_without_token_ids_are_rejected(tmp_path, bad_records, array, message):
    np.save(tmp_path / 'x.npy', array, allow_pickle=True)
    np.savez(tmp_path / 'x.npz', doc_0=array, doc_1=np.array([1, 2]))
    ((name, reason),) = bad_records(tmp_path / 'x.npy')
    assert name == 'x.npy'
    assert message in reason
    ((name, reason),) = bad_records(tmp_path / 'x.npz')
    assert name == 'x.npz:doc_0'
    assert message in reason


def test_damaged_arrays_are_named(tmp_path, bad_records):
    np.save(tmp_path / 'x.npy', np.arange(1000, dtype='uint16'))
    content = (tmp_path / 'x.npy').read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        (tmp_path / 'x.npy').write_bytes(content[:size])
        ((name, reason),) = bad_records(tmp_path / 'x.npy')
        assert name == 'x.npy'
        assert ('not a .npy array' if size < 128 else 'it was truncated') in reason
    np.savez_compressed(tmp_path / 'x.npz', a0=np.arange(1000, dtype='uint16'), a1=np.arange(5, dtype='uint16'))
    content = (tmp_path / 'x.npz').read_bytes()
    for size in (0, 100, len(content) - 10):
        (tmp_path / 'x.npz').write_bytes(content[:size])
        ((name, reason),) = bad_records(tmp_path / 'x.npz')
        assert name == 'x.npz'
        assert 'not a readable .npz file' in reason
    (tmp_path / 'x.npz').write_bytes(content[:200] + bytes([content[200] ^ 255]) + content[201:])
    ((name, reason),) = bad_records(tmp_path / 'x.npz')
    assert name == 'x.npz:a0'
    assert 'damaged' in reason


def test_members_of_an_archive_are_read_side_by_side(tmp_path, read, bad_records, small_chunks):
    # Rows are longer than the buffer of a member, so that the padding of each is skipped in the file.
    ids = np.arange(1, 6 * 2000 + 1).reshape(6, 2000)
    mask = np.arange(2000) < np.array([3, 2000, 1, 1999, 5, 7])[:, None]
    np.savez(tmp_path / 'x.npz', input_ids=ids, attention_mask=mask.astype('int64'))
    found = np.concatenate([document.tokens for document in read(tmp_path / 'x.npz')])
    assert found.tolist() == ids[mask].tolist()
    content = bytearray((tmp_path / 'x.npz').read_bytes())
    content[content.index(ids[0, 1000].tobytes())] ^= 255
    (tmp_path / 'x.npz').write_bytes(content)
    ((name, reason),) = bad_records(tmp_path / 'x.npz')
    assert name == 'x.npz:input_ids'
    assert 'damaged or truncated (Bad CRC-32' in reason


def test_a_file_in_an_archive_that_is_not_an_array_is_named(tmp_path, bad_records, read):
    array = io.BytesIO()
    np.save(array, np.array([1, 2]))
    with zipfile.ZipFile(tmp_path / 'x.npz', 'w') as archive:
        archive.writestr('readme', 'text')
        archive.writestr('a.npy', array.getvalue())
    assert [name for name, _ in bad_records(tmp_path / 'x.npz')] == ['x.npz:readme']
    assert [d.tokens.tolist() for d in read(tmp_path / 'x.npz', on_bad=lambda *_: None)] == [[1, 2]]


def test_a_file_that_is_shorter_than_its_ranges_is_named(tmp_path):
    np.save(tmp_path / 'x.npy', np.ones(1000, 'uint16'))
    (file,) = find_inputs([tmp_path / 'x.npy'])
    (tmp_path / 'x.npy').write_bytes((tmp_path / 'x.npy').read_bytes()[:1000])
    with pytest.raises(InputError, match=r'x\.npy: has 1000 bytes, not the 2128'):
        list(read_documents(FileRange(file, 500, 2000, 0), ReadOptions()))
