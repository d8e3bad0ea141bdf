from __future__ import annotations

import gzip

import fsspec
import pytest
import zstandard

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs, refuse_overlap
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.errors import InputError

TREE = ('b.txt', 'a/z.py', 'a/y.md', '.hidden.txt', '.git/x.txt', '__pycache__/x.py', 'page.xml', 'skip/x.txt')


def fill(root, names):
    """Writes files whose content is their name."""
    for name in names:
        with fsspec.open(f'{root}/{name}', 'wb', auto_mkdir=True) as file:
            file.write(name.encode())


def names(*args, **options):
    return [file.name for file in find_inputs(*args, **options)]


@pytest.fixture(params=['local', 'remote'])
def root(request, tmp_path):
    """Returns a directory on disk or in an in-memory bucket."""
    if request.param == 'local':
        yield str(tmp_path / 'root')
        return
    filesystem = fsspec.filesystem('memory')
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = ['']
    yield 'memory://bucket/root'
    filesystem.store.clear()


def test_files_of_a_directory_are_sorted(root):
    fill(f'{root}/books', TREE)
    files = find_inputs([f'{root}/books/'], exclude=['skip'])
    assert [(file.path, file.name, file.source, file.kind, file.size) for file in files] == [
        (f'{root}/books/{name}', name, 'books', 'text', len(name)) for name in ('a/y.md', 'a/z.py', 'b.txt')
    ]
    assert all(file.version for file in files)
    documents = [
        d for file in files for file_range in split_file(file, 1) for d in read_documents(file_range, ReadOptions())
    ]
    assert [document.text for document in documents] == ['a/y.md', 'a/z.py', 'b.txt']
    assert 'skip/x.txt' in names([f'{root}/books'])


def test_unknown_files_of_a_directory_are_classified_by_content(root):
    text = 'größe\n' * 3000
    contents = {
        'README': text.encode(),
        'x.log': text.encode()[1:],
        'y.adoc': b'',
        'z.txt.gz': gzip.compress(text.encode()),
        'z.GZ': gzip.compress(text.encode()),
        'z.zst': zstandard.compress(text.encode()),
        'a.txt': b'\xff',
    }
    binary = {
        'x.dat': b'text\0',
        'x.latin': 'größe'.encode('latin-1'),
        'picture': b'\x89PNG\r\n',
        'z.tar.gz': gzip.compress(b'text\0' * 100),
        'cut.gz': gzip.compress(text.encode())[:20],
        'x.bz2': b'text',
        'x.json': b'{}',
        'x.csv.gz': b'a,b',
    }
    for name, content in {**contents, **binary, '.git/HEAD': b'text', '.hidden': b'text'}.items():
        with fsspec.open(f'{root}/{name}', 'wb', auto_mkdir=True) as file:
            file.write(content)
    skipped = []
    files = find_inputs([root], on_skipped=skipped.extend)
    assert {file.name for file in files} == set(contents)
    assert {file.kind for file in files} == {'text'}
    assert {entry.name for entry in skipped} == set(binary)
    texts: dict[str, str] = {}
    bad: list[str] = []
    for file in files:
        for file_range in split_file(file, 1):
            texts |= {
                d.name: d.text for d in read_documents(file_range, ReadOptions(), lambda name, reason: bad.append(name))
            }
    assert bad == ['a.txt']
    assert {name: text for name in ('README', 'z.txt.gz', 'z.GZ', 'z.zst')} | {'x.log': text[1:]} == texts
    # Next to token files, no file is read as text, because the two cannot be mixed.
    fill(root, ['tokens/x.npy', 'tokens/README'])
    assert names([f'{root}/tokens']) == ['x.npy']


def test_a_linked_directory_is_not_searched(tmp_path):
    fill(tmp_path / 'books', TREE)
    (tmp_path / 'books' / 'link').symlink_to(tmp_path / 'books' / 'a')
    assert names([tmp_path / 'books']) == ['a/y.md', 'a/z.py', 'b.txt', 'skip/x.txt']
    (tmp_path / 'other').symlink_to(tmp_path / 'books')
    # A link that is given explicitly is followed, and its source is the name of the target.
    assert {file.source for file in find_inputs([tmp_path / 'other'])} == {'books'}


@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        ('x.jsonl', 'jsonl'),
        ('x.JSONL.GZ', 'jsonl'),
        ('x.ndjson.zst', 'jsonl'),
        ('x.parquet', 'parquet'),
        ('x.npz', 'tokens'),
        ('x.npy', 'tokens'),
        ('x.bin', 'tokens'),
        ('x.R', 'text'),
        ('x.xyz', 'text'),
        ('README', 'text'),
    ],
)
def test_an_explicit_file_may_have_any_suffix(root, name, kind):
    fill(root, [name])
    ((path, found, source, found_kind),) = [(f.path, f.name, f.source, f.kind) for f in find_inputs([f'{root}/{name}'])]
    assert (path, found, source, found_kind) == (f'{root}/{name}', name, name, kind)
    assert names([root]) == [name]


@pytest.mark.parametrize(
    ('glob', 'found', 'source'),
    [
        ('books/*.txt', ['b.txt'], 'books'),
        ('books/?.txt', ['b.txt'], 'books'),
        ('books/[a-c].txt', ['b.txt'], 'books'),
        ('books/a/[!y]*', ['z.py'], 'a'),
        ('books/**/*.txt', ['b.txt', 'skip/x.txt'], 'books'),
        ('books/**/a/*', ['a/y.md', 'a/z.py'], 'books'),
        # Matching directories are searched recursively; each file is found once.
        ('books/*', ['a/y.md', 'a/z.py', 'b.txt', 'skip/x.txt'], 'books'),
        ('books/**', ['a/y.md', 'a/z.py', 'b.txt', 'skip/x.txt'], 'books'),
        ('bo*/a', ['books/a/y.md', 'books/a/z.py'], 'root'),
        ('*/*/y.md', ['books/a/y.md'], 'root'),
        # An explicit pattern selects any suffix, and hidden files if the pattern is hidden.
        ('books/*.xml', ['page.xml'], 'books'),
        ('books/.*.txt', ['.hidden.txt'], 'books'),
    ],
)
def test_globs(root, glob, found, source):
    fill(f'{root}/books', TREE)
    files = find_inputs([f'{root}/{glob}'])
    assert [(file.name, file.source) for file in files] == [(name, source) for name in found]


def test_a_glob_in_the_current_directory(tmp_path, monkeypatch):
    fill(tmp_path / 'current', ['x.txt', 'd/y.txt'])
    monkeypatch.chdir(tmp_path / 'current')
    assert [(f.path, f.name, f.source) for f in find_inputs(['*.txt'])] == [('./x.txt', 'x.txt', 'current')]
    assert names(['**/*.txt']) == ['d/y.txt', 'x.txt']


def test_an_existing_path_is_not_a_glob(tmp_path):
    fill(tmp_path, ['[ab].txt', 'a.txt', 'd[1]/x.txt'])
    assert names([tmp_path / '[ab].txt']) == ['[ab].txt']
    assert names([tmp_path / 'd[1]']) == ['x.txt']
    assert names([tmp_path / '[a].txt']) == ['a.txt']


@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ('nothing', r'root/nothing: No such file'),
        ('nothing/*.txt', r'root/nothing|matches nothing'),
        ('*.md', r'root/\*\.md matches nothing'),
        ('pictures/*', r'matches no readable file: .*\.jsonl'),
        ('pictures', r'pictures contains no text'),
    ],
)
def test_missing_and_empty_paths(root, path, message):
    fill(root, ['pictures/x.png'])
    with pytest.raises(InputError, match=message):
        find_inputs([f'{root}/{path}'])


def test_exclude_accepts_patterns(root):
    fill(root, ['a.txt', 'a.md', 'drafts-1/b.txt', 'final/b.txt'])
    assert names([root], exclude=['drafts-*', '*.md']) == ['a.txt', 'final/b.txt']
    assert names([f'{root}/**/*.txt'], exclude=['final']) == ['a.txt', 'drafts-1/b.txt']


def test_the_first_files_by_name(root):
    fill(f'{root}/a', ['3.txt', '1.txt', '2.txt'])
    fill(f'{root}/b', ['9.txt', '8.txt'])
    assert names([f'{root}/a', f'{root}/b'], max_files=2) == ['1.txt', '2.txt', '8.txt', '9.txt']
    assert names([f'{root}/a/*.txt'], max_files=1) == ['1.txt']
    assert len(names([f'{root}/a', f'{root}/b'], max_files=0)) == 5


def test_text_and_token_files_are_not_mixed(root):
    fill(root, ['train.bin', 'README.md'])
    with pytest.raises(InputError, match=r"root contains token files \(train\.bin\) and text \(README\.md\).*'\*\.md'"):
        find_inputs([root])
    assert names([root], exclude=['*.md']) == ['train.bin']
    assert names([f'{root}/*.md']) == ['README.md']


def test_equal_names_are_prefixed_with_their_source(root):
    fill(root, ['a/x.txt', 'b/x.txt', 'other/a/x.txt'])
    assert names([f'{root}/a', f'{root}/b']) == ['a/x.txt', 'b/x.txt']
    with pytest.raises(InputError, match=r'would both be named a/x\.txt'):
        find_inputs([f'{root}/a', f'{root}/other/a'])


def test_a_file_cannot_be_given_twice(root):
    fill(root, ['a/b/x.txt', 'a/y.txt'])
    for second in ('a/b', 'a/b/x.txt', 'a/*/x.txt'):
        with pytest.raises(InputError, match='given twice'):
            find_inputs([f'{root}/a', f'{root}/{second}'])
    training = find_inputs([f'{root}/a'])
    with pytest.raises(InputError, match='in --validation and in --input'):
        refuse_overlap(training, find_inputs([f'{root}/a/b/x.txt']))
    refuse_overlap(find_inputs([f'{root}/a/y.txt']), find_inputs([f'{root}/a/b']))


def test_a_link_is_the_same_file_as_its_target(tmp_path):
    fill(tmp_path, ['a/x.txt'])
    (tmp_path / 'a' / 'link.txt').symlink_to('x.txt')
    (tmp_path / 'other.txt').symlink_to('a/x.txt')
    assert names([tmp_path / 'a']) == ['link.txt', 'x.txt']
    with pytest.raises(InputError, match='given twice'):
        find_inputs([tmp_path / 'a', tmp_path / 'other.txt'])


def test_the_version_changes_when_a_file_is_edited(tmp_path):
    fill(tmp_path, ['x.txt'])
    before = find_inputs([tmp_path])
    assert find_inputs([f'file://{tmp_path}']) == before
    (tmp_path / 'x.txt').write_text('y.txt')
    assert find_inputs([tmp_path])[0].version != before[0].version


def test_a_glob_needs_a_bucket():
    with pytest.raises(InputError, match=r'memory://\*/x: name a bucket'):
        find_inputs(['memory://*/x'])
