import bz2
import gzip
import io
import json
import re
import tarfile

import pytest
import zstandard

from maxlm.data.formats.discovery import find_inputs
from maxlm.errors import InputError

TEXT = 'The quick brown fox.\n' * 40


def archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode='w') as tar:
        entry = tarfile.TarInfo('a.txt')
        entry.size = len(TEXT)
        tar.addfile(entry, io.BytesIO(TEXT.encode()))
    return file.getvalue()


@pytest.mark.parametrize(
    ('name', 'content', 'reason'),
    [
        # Tar headers and NUL bytes are valid UTF-8, so that these files would be texts.
        ('x.tar', archive(), 'archives are not read; unpack it and give the directory'),
        ('x.tar.gz', gzip.compress(archive()), 'archives are not read; unpack it and give the directory'),
        ('x.TAR.zst', zstandard.compress(archive()), 'archives are not read; unpack it and give the directory'),
        ('x.tar.bz2', bz2.compress(archive()), 'archives are not read; unpack it and give the directory'),
        ('x.zip', b'PK', 'archives are not read; unpack it and give the directory'),
        (
            'x.jsonl.bz2',
            bz2.compress(b'{}'),
            '.bz2 files are not decompressed; decompress it, or compress it with gzip',
        ),
        ('x.txt.xz', b'', '.xz files are not decompressed; decompress it, or compress it with gzip or zstd'),
        ('x.csv', b'text\n', '.csv files are not read, because their records would become one text; give hf:'),
        ('x.tsv.gz', gzip.compress(b'text\n'), '.tsv files are not read, because their records would become one text'),
        ('x.parquet.gz', gzip.compress(b'PAR1\0'), 'compressed .parquet files are not read; decompress it'),
        ('x.npy.zst', zstandard.compress(b'\x93NUMPY'), 'compressed .npy files are not read; decompress it'),
    ],
    # The contents contain times, so they cannot be names of tests.
    ids=lambda value: value if isinstance(value, str) else 'content',
)
def test_files_without_text_are_refused(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    suffix = name[name.index('.') :]
    for given in (tmp_path / name, f'{tmp_path}/*{suffix}', tmp_path):
        message = f'{tmp_path}/{name}: {reason}'
        with pytest.raises(InputError, match=re.escape(message)):
            find_inputs([given])


@pytest.mark.parametrize('name', ['x.xml', 'x.svg', 'x.log', 'x', 'x.gz', 'tar.txt', 'x.tar.txt', 'zip'])
def test_other_files_given_by_name_are_texts(tmp_path, name):
    content = gzip.compress(TEXT.encode()) if name.endswith('.gz') else TEXT.encode()
    (tmp_path / name).write_bytes(content)
    assert [file.kind for file in find_inputs([tmp_path / name])] == ['text']


@pytest.mark.parametrize('name', ['x.jsonlines', 'x.JSONLINES.gz', 'x.ndjson.zst', 'x.jsonl'])
def test_suffixes_of_json_lines(tmp_path, read, name):
    content = ''.join(json.dumps({'text': str(number)}) + '\n' for number in range(3)).encode()
    compress = {'gz': gzip.compress, 'zst': zstandard.compress}.get(name.rpartition('.')[2], bytes)
    (tmp_path / name).write_bytes(compress(content))
    for given in (tmp_path / name, tmp_path):
        assert [document.text for document in read(given)] == ['0', '1', '2']


@pytest.mark.parametrize('name', ['x.pdf', 'x.PNG', 'x.safetensors', 'x.pkl.gz'])
def test_files_that_never_contain_text(tmp_path, name):
    (tmp_path / name).write_bytes(b'%PDF-1.4 letters\n')
    with pytest.raises(InputError, match=r'files contain no plain text; convert it to a \.txt file'):
        find_inputs([tmp_path / name])
    with pytest.raises(InputError, match=f'^{tmp_path} contains no text'):
        find_inputs([tmp_path])
    # They are skipped beside texts.
    (tmp_path / 'a.txt').write_text(TEXT)
    assert [file.name for file in find_inputs([tmp_path])] == ['a.txt']
