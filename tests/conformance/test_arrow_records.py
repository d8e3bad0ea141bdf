"""Conversations with tools in JSONL, Parquet and data sets, in which Arrow adds nulls."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxlm.data.documents.conversation import parse_conversation
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from tests.conformance.tool_messages import ASK, DONE, TOOL, calling, encoded, wrapped

ROWS = [
    {
        'messages': [
            ASK,
            {'role': 'assistant', 'content': None, 'tool_calls': [wrapped('w', {'city': 'Oslo'}, id='1')]},
            {'role': 'tool', 'tool_call_id': '1', 'content': '3'},
            {**DONE, 'weight': 1},
        ],
        'tools': [TOOL],
    },
    {
        'messages': [ASK, {**calling({'n': 3, 'l': [None, 2]}), 'name': 'x'}, DONE],
        'tools': [
            {'type': 'function', 'function': {'name': 'v', 'parameters': {'properties': {'n': {'type': 'integer'}}}}}
        ],
    },
    {'messages': [ASK, DONE], 'tools': None, 'system': 'other'},
]


def write_jsonl(rows, path):
    (path / 'x.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return path / 'x.jsonl'


def write_parquet(rows, path):
    pq.write_table(pa.Table.from_pylist(rows), path / 'x.parquet')
    return path / 'x.parquet'


def write_dataset(kind, **options):
    def write(rows, path):
        datasets = pytest.importorskip('datasets', reason='the extra hub')
        datasets.disable_progress_bars()
        dataset = datasets.Dataset.from_list(rows, **options)
        if kind == 'hub':
            dataset.save_to_disk(path / 'set')
            return f'hf:{path / "set"}'
        getattr(dataset, f'to_{kind}')(path / f'x.{"jsonl" if kind == "json" else kind}')
        return path / f'x.{"jsonl" if kind == "json" else kind}'

    return write


WRITERS = {
    'JSONL': write_jsonl,
    'Parquet': write_parquet,
    'Dataset.to_json': write_dataset('json'),
    'Dataset.to_parquet': write_dataset('parquet'),
    'save_to_disk': write_dataset('hub'),
    'Json columns in Parquet': write_dataset('parquet', on_mixed_types='use_json'),
    'Json columns in JSONL': write_dataset('json', on_mixed_types='use_json'),
    'Json columns of a data set': write_dataset('hub', on_mixed_types='use_json'),
}


def read(path):
    options = ReadOptions(format='auto')
    return [
        document
        for file in find_inputs([path])
        for file_range in split_file(file, 2**40)
        for document in read_documents(file_range, options, lambda name, reason: pytest.fail(reason))
    ]


@pytest.mark.parametrize('writer', WRITERS)
def test_rows_give_the_same_conversations_in_all_files(tmp_path, writer):
    found = [document.conversation for document in read(WRITERS[writer](ROWS, tmp_path))]
    assert found == [parse_conversation(row) for row in ROWS]
    # Arrow adds nulls: the test would fail without their removal.
    assert 'null' not in encoded(ROWS[0]).replace('["Oslo", null]', '')
