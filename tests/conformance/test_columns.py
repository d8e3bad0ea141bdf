"""Columns of text as other tools write them: Arrow types, nested fields, and data sets of `save_to_disk`."""

import json

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from maxlm.data.documents.document import raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.data.formats.record_formats import find_format
from maxlm.errors import InputError

TEXTS = ['a', None, '', 'ü']
ROWS = [
    {'id': 1, 'meta': {'text': 'one', 'url': 'u', 'deep': {'n': 3}}},
    {'id': 2, 'meta': {'text': 'two', 'url': 'v', 'deep': {'n': 4}}},
]
CHAT = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]


@pytest.fixture(params=['jsonl', 'parquet', 'saved', 'hub of parquet', 'hub of jsonl'])
def write(request, tmp_path):
    """Returns a function that writes rows in a format and returns the input."""

    def write_jsonl(rows, path):
        path.write_text('\n'.join(map(json.dumps, rows)))
        return path

    def write_parquet(rows, path):
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    def write(rows):
        if not request.param.startswith(('hub', 'saved')):
            path = tmp_path / f'x.{request.param}'
            return (write_jsonl if request.param == 'jsonl' else write_parquet)(rows, path)
        datasets = pytest.importorskip('datasets', reason='the extra hub')
        datasets.disable_progress_bars()
        if request.param == 'saved':
            datasets.Dataset.from_list(rows).save_to_disk(tmp_path / 'set')
        else:
            (tmp_path / 'set').mkdir()
            kind = request.param.rpartition(' ')[2]
            (write_jsonl if kind == 'jsonl' else write_parquet)(rows, tmp_path / 'set' / f'train.{kind}')
        return f'hf:{tmp_path / "set"}'

    return write


def read(path, on_bad=raise_bad, **options):
    return [
        document
        for file in find_inputs([path])
        for file_range in split_file(file, 2**40)
        for document in read_documents(file_range, ReadOptions(**options), on_bad)
    ]


@pytest.mark.parametrize(
    'kind',
    [
        *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
        *(pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_string()), pa.json_()),
    ],
    ids=str,
)
def test_types_of_text(tmp_path, kind):
    column = pa.array(TEXTS, pa.string())
    if isinstance(kind, pa.DictionaryType):
        column = column.dictionary_encode().cast(kind)
    else:
        column = pa.ExtensionArray.from_storage(kind, column) if isinstance(kind, pa.JsonType) else column.cast(kind)
    pq.write_table(
        pa.table({'text': column, 'meta': pa.StructArray.from_arrays([column], ['text'])}), tmp_path / 'x.parquet'
    )
    assert str(pq.read_schema(tmp_path / 'x.parquet').field('text').type).startswith(str(kind).partition('<')[0])
    for key in ('text', 'meta.text'):
        assert [(d.name, d.text) for d in read(tmp_path / 'x.parquet', text_key=key)] == [
            ('x.parquet:0', 'a'),
            ('x.parquet:3', 'ü'),
        ]


@pytest.mark.parametrize('kind', [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
def test_lists_of_messages(tmp_path, kind):
    messages = pa.struct({'role': pa.string(), 'content': pa.string_view()})
    pq.write_table(pa.table({'messages': pa.array([CHAT], kind(messages))}), tmp_path / 'x.parquet')
    (document,) = read(tmp_path / 'x.parquet', format='chat')
    assert list(document.conversation.messages) == CHAT


def test_binary_of_fixed_size_is_not_text(tmp_path):
    pq.write_table(pa.table({'text': pa.array([b'ab'], pa.binary(2))}), tmp_path / 'x.parquet')
    with pytest.raises(InputError, match=r"the column 'text' contains fixed_size_binary\[2\], not text"):
        read(tmp_path / 'x.parquet')


def test_nested_text_and_metadata(write):
    path = write(ROWS)
    found = read(path, text_key='meta.text', metadata_keys=('meta.url', 'meta.deep.n'))
    nested = [{key: d.metadata[key] for key in ('meta.url', 'meta.deep.n')} for d in found]
    assert [d.text for d in found] == ['one', 'two']
    assert nested == [{'meta.url': 'u', 'meta.deep.n': 3}, {'meta.url': 'v', 'meta.deep.n': 4}]
    assert find_format('auto', find_inputs([path]), text_key='meta.text') == 'text'


def test_a_field_with_a_dot_in_its_name_comes_first(write):
    rows = [{**row, 'meta.text': 'dot', 'a.b': {'c.d': 'deep'}} for row in ROWS]
    path = write(rows)
    assert [d.text for d in read(path, text_key='meta.text')] == ['dot', 'dot']
    assert [d.text for d in read(path, text_key='a.b.c.d')] == ['deep', 'deep']


def test_nested_messages(write):
    path = write([{'id': 1, 'data': {'turns': CHAT, 'text': 'other'}}])
    assert find_format('auto', find_inputs([path]), text_key='text', messages_field='data.turns') == 'auto'
    (document,) = read(path, format='auto', messages_field='data.turns')
    assert list(document.conversation.messages) == CHAT


@pytest.mark.parametrize(
    ('options', 'what'),
    [
        ({'text_key': 'meta.txt'}, "'meta.txt'"),
        ({'text_key': 'meta.deep.n.x'}, "'meta.deep.n.x'"),
        ({'format': 'auto', 'messages_field': 'meta.turns'}, "'meta.turns'"),
    ],
)
def test_errors_list_nested_fields(write, options, what):
    bad = []
    assert read(write(ROWS), on_bad=lambda _, reason: bad.append(reason), **options) == []
    assert what in bad[0]
    assert 'it has id, meta, meta.text, meta.url, meta.deep, meta.deep.n' in bad[0]


@pytest.mark.parametrize('is_dict', [False, True])
def test_a_directory_of_save_to_disk_is_read(tmp_path, is_dict):
    datasets = pytest.importorskip('datasets', reason='the extra hub')
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{'text': 'one'}, {'text': 'two'}])
    (datasets.DatasetDict({'train': rows, 'test': rows.select([0])}) if is_dict else rows).save_to_disk(
        tmp_path / 'set'
    )
    assert [d.text for d in read(tmp_path / 'set')] == ['one', 'two']
    assert find_inputs([tmp_path / 'set']) == find_inputs([f'hf:{tmp_path / "set"}'])
    # A directory that contains it is not.
    (tmp_path / 'README.md').write_text('about the data set')
    with pytest.raises(InputError, match=rf'{tmp_path}/set was written by save_to_disk; give hf:{tmp_path}/set'):
        find_inputs([tmp_path])
    assert [file.name for file in find_inputs([tmp_path], exclude=['set'])] == ['README.md']
    if is_dict:
        assert [d.text for d in read(tmp_path / 'set' / 'test')] == ['one']


@pytest.mark.parametrize('name', ['x.arrow', 'x.feather', 'X.FEATHER'])
def test_arrow_files_name_the_way_to_read_them(tmp_path, name):
    pyarrow.feather.write_feather(pa.table({'text': ['a']}), tmp_path / name, compression='uncompressed')
    remedy = f'give hf:{tmp_path} to read the .arrow files' if name == 'x.arrow' else 'convert it to Parquet'
    for given in (tmp_path, tmp_path / name, f'{tmp_path}/*.{name[2:]}'):
        with pytest.raises(InputError, match=f'{name}: Arrow files are not read; {remedy}'):
            find_inputs([given])
    if name == 'x.arrow':
        pytest.importorskip('datasets', reason='the extra hub')
        assert [d.text for d in read(f'hf:{tmp_path}')] == ['a']
