"""Labels of answers in all spellings. A bad answer is never imitated."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxlm.cli.setup.prepare import main as prepare
from maxlm.data.dataset.records import load_manifest
from maxlm.data.documents.conversation import parse_conversation
from maxlm.data.documents.parse_record import entry_document, entry_format
from maxlm.data.documents.preference import has_preference, parse_preference
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.data.formats.record_formats import find_format
from maxlm.errors import InputError

GOOD = (True, 1, 1.0, 'true', 'True', 'TRUE', ' true ', '1')
BAD = (False, 0, 0.0, -0.0, 'false', 'False', 'FALSE', '0')
NO_LABELS = (0.5, 2, -1, float('nan'), float('inf'), 'good', 'bad', 'yes', '', [], [0], {}, {'value': 0})
TURNS = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'BAD'}]
RECORDS = {
    'texts': {'prompt': 'q', 'completion': 'BAD'},
    'messages': {'prompt': TURNS[:1], 'completion': TURNS[1:]},
    'conversation': {'messages': TURNS},
    'ShareGPT': {'conversations': [{'from': 'human', 'value': 'q'}, {'from': 'gpt', 'value': 'BAD'}]},
    'Alpaca': {'instruction': 'q', 'output': 'BAD'},
}


def document(record, kind):
    return entry_document('x', 's', dict(record), ReadOptions(format=kind))


@pytest.mark.parametrize('record', RECORDS.values(), ids=RECORDS)
@pytest.mark.parametrize('label', GOOD + BAD, ids=repr)
def test_labels(record, label):
    labeled = {**record, 'label': label}
    assert entry_format(labeled, ReadOptions()) == 'preference'
    preference = document(labeled, 'preference').preference
    answer, missing = preference.chosen, preference.rejected
    if label in BAD:
        answer, missing = missing, answer
    assert (list(answer.messages), answer.learned, missing) == (TURNS, (False, True), None)
    # Supervised training learns all answers, so it accepts no labels.
    for kind in ('auto', 'chat'):
        with pytest.raises(ValueError, match="'label' marks completions as good or bad, and bad completions"):
            document(labeled, kind)


@pytest.mark.parametrize('record', RECORDS.values(), ids=RECORDS)
@pytest.mark.parametrize('label', NO_LABELS, ids=repr)
def test_other_values_are_errors(record, label):
    labeled = {**record, 'label': label}
    assert not has_preference(labeled)
    for kind in ('preference', 'auto', 'chat'):
        with pytest.raises(ValueError, match=r"'label' is .*, which marks an answer neither"):
            document(labeled, kind)


@pytest.mark.parametrize('record', RECORDS.values(), ids=RECORDS)
def test_records_without_a_label(record):
    for unlabeled in (record, {**record, 'label': None}):
        assert entry_format(unlabeled, ReadOptions()) == 'chat'
        assert parse_preference(unlabeled) is None
        found = document(unlabeled, 'auto')
        assert found.text.endswith('BAD')
        with pytest.raises(ValueError, match='no preference'):
            document(unlabeled, 'preference')


def test_labels_of_texts_and_pairs_have_no_meaning():
    assert document({'text': 'a', 'label': 0}, 'auto').text == 'a'
    pair = {'prompt': 'q', 'chosen': 'a', 'rejected': 'b', 'label': 3}
    assert parse_preference(pair).rejected is not None
    assert parse_conversation({**pair, 'messages': TURNS, 'label': None}) is not None


@pytest.mark.parametrize('kind', ['bool', 'int8', 'uint8', 'int64', 'float32', 'string', 'dictionary'])
def test_columns_of_parquet(tmp_path, kind):
    values = pa.array(np.array([1, 0, 1]), 'int64')
    if kind == 'dictionary':
        values = values.cast('string').dictionary_encode()
    else:
        values = values.cast(kind)
    pq.write_table(
        pa.table({'prompt': ['q'] * 3, 'completion': ['a', 'b', 'c'], 'label': values}), tmp_path / 'x.parquet'
    )
    files = find_inputs([tmp_path / 'x.parquet'])
    assert find_format('auto', files, text_key='text') == 'preference'
    options = ReadOptions(format='preference')
    found = [each for part in split_file(files[0], 2**40) for each in read_documents(part, options, pytest.fail)]
    assert [each.preference.rejected is None for each in found] == [True, False, True]


@pytest.mark.parametrize('label', [False, 0, 0.0, 'false', 'x'])
def test_prepare_never_imitates_a_bad_answer(tmp_path, label):
    records = [{'prompt': 'q', 'completion': 'good'}, {'prompt': 'q', 'completion': 'BAD', 'label': label}]
    (tmp_path / 'x.jsonl').write_text('\n'.join(map(json.dumps, records)))
    options = {'--input': tmp_path / 'x.jsonl', '--tokenizer': 'bytes', '--output': tmp_path / 'data', '--workers': 1}
    arguments = [str(each) for pair in options.items() for each in pair] + ['--validation-fraction', '0']
    with pytest.raises(InputError, match=r"x\.jsonl:2: 'label'"):
        prepare(arguments)
    assert prepare([*arguments, '--skip-bad-records']) == 0
    assert [entry['name'] for entry in load_manifest(tmp_path / 'data').left_out] == ['x.jsonl:2']
