"""Filters, deduplication, fill-in-the-middle and token files, from the command to the records."""

import gzip
import json
import random
import re

import numpy as np
import pyarrow.parquet
import pytest

from maxlm.data.dataset.records import load_manifest, verify
from maxlm.data.prepare import partitions
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, ids_tokenizer
from tests.conftest import ROOT
from tests.messages import assert_error_line
from tests.preparing import contents, documents_of, ids_of, run
from tests.user_modules import write_module

WORDS = [
    f'{a}{b}' for a in ('stone', 'river', 'lantern', 'orchard', 'window') for b in ('', 's', 'like', 'ward', 'less')
]


def prose(seed, count=120):
    return ' '.join(random.Random(seed).choices(WORDS, k=count))


@pytest.fixture
def small_partitions(monkeypatch):
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 3000)


@pytest.fixture
def corpus(tmp_path):
    """Writes twenty texts: 3 equals 1 except for line ends, 4 resembles 2, C4 removes text 10 and trims text 11."""
    texts = {f'{i:02}': f'{prose(i)} end of it.' for i in range(20)}
    # Enough complete sentences for C4.
    texts = {
        name: '\n'.join([text] + [f'Line {j} of {name} goes on.' for j in range(6)]) for name, text in texts.items()
    }
    texts['03'] = texts['01'] + '\r\n'
    texts['04'] = texts['02'] + '\nOne more line that ends.'
    texts['10'] += '\nLorem ipsum dolor sit amet.'
    texts['11'] = 'menu without an end\n' + texts['11']
    directory = tmp_path / 'texts'
    directory.mkdir()
    for name, text in texts.items():
        (directory / f'{name}.txt').write_text(text, newline='')
    return directory


def prepare(tmp_path, corpus, *more, output='data', expected=0):
    # Complete documents are used for validation.
    arguments = ['--input', corpus, '--output', tmp_path / output, '--tokenizer', 'bytes', '--workers', 1]
    arguments += ['--validation-fraction', 0.3]
    assert run(*arguments, *more) == expected
    return load_manifest(tmp_path / output) if expected == 0 else None


def test_duplicates_are_removed_and_reported(tmp_path, corpus, small_partitions, capsys):
    everything = prepare(tmp_path, corpus, output='all')
    assert sum(split.documents for split in everything.splits.values()) == 20
    assert 'cleaning.json' not in contents(tmp_path / 'all')
    exact = prepare(tmp_path, corpus, '--deduplicate', 'exact', output='exact')
    assert sum(split.documents for split in exact.splits.values()) == 19
    capsys.readouterr()
    near = prepare(tmp_path, corpus, '--deduplicate', 'near')
    assert sum(split.documents for split in near.splits.values()) == 18
    report = json.loads((tmp_path / 'data' / 'cleaning.json').read_text())
    assert (report['documents'], report['kept_documents']) == (20, 18)
    (equal,) = report['removed']['duplicate: exact']['examples']
    (similar,) = report['removed']['duplicate: near']['examples']
    assert (equal['name'], equal['detail']) == ('03.txt', '01.txt')
    assert (similar['name'], similar['detail']) == ('04.txt', '02.txt')
    text_bytes = sum(split.text_bytes for split in near.splits.values())
    assert (
        report['kept_bytes']
        == text_bytes
        == report['bytes'] - sum(removed['bytes'] for removed in report['removed'].values())
    )
    printed = capsys.readouterr().out
    assert 'cleaning: 18 of 20 documents kept' in printed
    assert 'duplicate: near' in printed
    # A second run prints the counts again without doing any work.
    before = contents(tmp_path / 'data')
    prepare(tmp_path, corpus, '--deduplicate', 'near')
    assert 'cleaning: 18 of 20 documents kept' in capsys.readouterr().out
    assert contents(tmp_path / 'data') == before
    # With a stricter threshold, similar texts are kept.
    strict = prepare(tmp_path, corpus, '--deduplicate', 'near', '--dedup-threshold', 1, output='strict')
    assert sum(split.documents for split in strict.splits.values()) == 19


def test_filters_remove_and_shorten(tmp_path, corpus, small_partitions):
    dataset = prepare(tmp_path, corpus, '--filter', 'c4', '--deduplicate', 'exact')
    texts = documents_of(dataset, 'train') + documents_of(dataset, 'validation')
    assert len(texts) == 18
    assert not any('Lorem' in text or 'menu' in text for text in texts)
    report = json.loads((tmp_path / 'data' / 'cleaning.json').read_text())
    assert report['removed']['c4: lorem ipsum']['examples'][0]['name'] == '10.txt'
    assert report['kept_documents'] == 18
    assert report['kept_bytes'] == sum(len(text.encode()) for text in texts)
    assert report['shortened_documents'] >= 1
    # Negative control: without the filter, both documents are kept.
    everything = prepare(tmp_path, corpus, output='all')
    texts = documents_of(everything, 'train') + documents_of(everything, 'validation')
    assert sum('Lorem' in text or 'menu' in text for text in texts) == 2


DOCUMENTED = re.search(r'```\n(def .*?)```', (ROOT / 'docs/data.md').read_text(), re.DOTALL)


@pytest.fixture
def web(tmp_path):
    """Writes a JSONL file of forty documents; every fourth is Danish."""
    # Enough complete sentences for C4.
    texts = ['\n'.join([f'{prose(i)} end.'] + [f'Line {j} of {i} goes on.' for j in range(6)]) for i in range(40)]
    lines = [{'text': text, 'language': 'en' if i % 4 else 'da'} for i, text in enumerate(texts)]
    (tmp_path / 'web.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    return tmp_path / 'web.jsonl'


@pytest.mark.multiprocess
def test_the_documented_filter_of_the_user_runs_in_workers(tmp_path, web, small_partitions, monkeypatch, capsys):
    assert DOCUMENTED
    write_module(tmp_path, monkeypatch, DOCUMENTED[1], name='my_filters')
    for output, workers in {'one': 1, 'two': 2}.items():
        filters = ['--filter', 'c4', '--filter', 'my_filters:keep_english']
        dataset = prepare(tmp_path, web, *filters, '--workers', workers, output=output)
    assert contents(tmp_path / 'one') == contents(tmp_path / 'two')
    assert sum(split.documents for split in dataset.splits.values()) == 30
    report = json.loads((tmp_path / 'two' / 'cleaning.json').read_text())
    assert report['removed']['my_filters:keep_english: removed']['documents'] == 10
    assert dataset.made_from['filter'][0] == 'c4'
    assert dataset.made_from['filter'][1].startswith('my_filters:keep_english with checksum ')
    # The same command finds the data set; another filter or an edited one does not.
    prepare(tmp_path, web, *filters, output='one')
    prepare(tmp_path, web, '--filter', 'c4', output='one', expected=2)
    (tmp_path / 'my_filters.py').write_text(f'{DOCUMENTED[1]}# edited')
    capsys.readouterr()
    prepare(tmp_path, web, *filters, output='one', expected=2)
    assert 'contains a data set made from filter [' in capsys.readouterr().err


def test_errors_of_a_filter_of_the_user_are_one_line(tmp_path, web, monkeypatch, capsys):
    body = 'def fails(document):\n    return document.text.index("stone") >= 0 and 1 / 0\n'
    write_module(tmp_path, monkeypatch, body, name='broken_filters')
    prepare(tmp_path, web, '--filter', 'broken_filters:fail', expected=2)
    assert "has no 'fail'; did you mean 'fails'?" in capsys.readouterr().err
    assert not (tmp_path / 'data').exists()
    prepare(tmp_path, web, '--filter', 'broken_filters:fails', expected=2)
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert 'web.jsonl:0: the filter broken_filters:fails raised ZeroDivisionError: division by zero at ' in error[0]


def test_a_filter_of_the_user_reads_columns_of_parquet(tmp_path, monkeypatch, capsys):
    table = {'text': [f'{prose(i)}.' for i in range(8)], 'score': [i / 10 for i in range(8)]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / 'web.parquet')
    body = 'def good(document):\n    return document.metadata["score"] > 0.45'
    name = write_module(tmp_path, monkeypatch, body)
    arguments = [tmp_path / 'web.parquet', '--filter', f'{name}:good']
    dataset = prepare(tmp_path, *arguments, '--metadata-fields', 'score')
    assert sum(split.documents for split in dataset.splits.values()) == 3
    assert dataset.made_from['metadata_keys'] == ['score']
    # Negative control: without the option, the filter has no such field.
    prepare(tmp_path, *arguments, output='other', expected=2)
    assert "raised KeyError: 'score'" in capsys.readouterr().err


def test_the_tokenizer_is_not_trained_on_removed_text(tmp_path, corpus, small_partitions):
    (corpus / '05.txt').write_text((corpus / '05.txt').read_text() + '\nLorem ipsum ЖЖЖ.')
    (corpus / '06.txt').write_text('Ω without an end\n' + (corpus / '06.txt').read_text())
    arguments = ['--tokenizer', 'chars', '--validation-fraction', 0]
    prepare(tmp_path, corpus, *arguments, '--filter', 'c4')
    prepare(tmp_path, corpus, *arguments, output='all')
    letters, more_letters = (
        json.loads((tmp_path / name / 'tokenizer.json').read_text())['model']['vocab'].keys()
        for name in ('data', 'all')
    )
    assert {'Ж', 'Ω'} <= more_letters - letters
    assert 'e' in letters


def test_training_excludes_validation_documents(tmp_path, corpus, small_partitions):
    held_out = tmp_path / 'held_out'
    held_out.mkdir()
    # The validation document is kept although it is the last by name.
    (held_out / 'zz.txt').write_text((corpus / '02.txt').read_text())
    dataset = prepare(tmp_path, corpus, '--validation', held_out, '--deduplicate', 'near')
    assert documents_of(dataset, 'validation') == [(corpus / '02.txt').read_text()]
    # 02 and 04 resemble the validation document, and 03 equals 01.
    assert dataset.splits['train'].documents == 17
    report = json.loads((tmp_path / 'data' / 'cleaning.json').read_text())
    assert report['removed']['duplicate: exact']['examples'][0] == {
        'name': '02.txt',
        'excerpt': report['removed']['duplicate: exact']['examples'][0]['excerpt'],
        'detail': 'zz.txt',
    }


def test_fim_rearranges_a_fraction_of_the_documents(tmp_path, corpus, small_partitions):
    dataset = prepare(tmp_path, corpus, '--fim-rate', 0.5)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    prefix, middle, suffix = tokenizer.infill_ids
    documents = ids_of(dataset, 'train') + ids_of(dataset, 'validation')
    cut = [ids for ids in documents if prefix in ids]
    assert 4 <= len(cut) <= 16
    for ids in cut:
        assert sum(np.isin(ids, [prefix, middle, suffix])) == 3
    assert dataset.vocab_size == bytes_tokenizer().vocab_size + 3
    without_fim = prepare(tmp_path, corpus, '--fim-rate', 0, output='plain')
    assert without_fim.vocab_size == 257
    # The amount of text is equal to that without FIM.
    assert sum(split.text_bytes for split in without_fim.splits.values()) == sum(
        split.text_bytes for split in dataset.splits.values()
    )
    first = prepare(tmp_path, corpus, '--fim-rate', 1, '--fim-spm-rate', 1, output='first')
    assert all(ids[0] == prefix and ids[1] == suffix for ids in ids_of(first, 'train'))


def test_token_files(tmp_path, small_partitions, capsys):
    rng = np.random.default_rng(3)
    parts = [rng.integers(0, 99, rng.integers(1, 300)) for _ in range(60)]
    stream = np.concatenate([np.append(part, 99) for part in parts]).astype(np.uint16)
    np.save(tmp_path / 'tokens.npy', stream)
    dataset = prepare(tmp_path, tmp_path / 'tokens.npy', '--tokenizer', 'ids:100')
    verify(dataset)
    found = ids_of(dataset, 'train') + ids_of(dataset, 'validation')
    assert sorted(ids.tolist() for ids in found) == sorted(part.tolist() for part in parts)
    assert dataset.end_of_document == 99
    assert dataset.splits['train'].text_bytes == 0
    assert 'bytes per token' not in capsys.readouterr().out
    # This tokenizer.json has a different end token.
    ids_tokenizer(120, 5).save(tmp_path / 'tokenizer.json')
    other = ['--tokenizer', tmp_path / 'tokenizer.json', '--eod-token', 99]
    dataset = prepare(tmp_path, tmp_path / 'tokens.npy', *other, output='other')
    assert dataset.end_of_document == 5
    assert sum(split.documents for split in dataset.splits.values()) == 60
    # Duplicate token documents are also found.
    np.save(tmp_path / 'twice.npy', np.concatenate([stream, stream]))
    twice = prepare(
        tmp_path, tmp_path / 'twice.npy', '--tokenizer', 'ids:100', '--deduplicate', 'exact', output='twice'
    )
    assert sum(split.documents for split in twice.splits.values()) == len({tuple(part.tolist()) for part in parts})


def test_text_and_tokens_in_one_data_set(tmp_path, small_partitions):
    (tmp_path / 'a.txt').write_text('1 2 3')
    np.save(tmp_path / 'b.npy', np.array([4, 5, 9], np.uint16))
    arguments = ['--input', tmp_path / 'a.txt', tmp_path / 'b.npy', '--tokenizer', 'ids:10', '--validation-fraction', 0]
    assert run(*arguments, '--output', tmp_path / 'data') == 0
    dataset = load_manifest(tmp_path / 'data')
    assert [ids.tolist() for ids in ids_of(dataset, 'train')] == [[1, 2, 3], [4, 5]]
    train = dataset.splits['train']
    # The bytes of a part are unknown, so the total is unknown.
    assert (train.sources['a.txt'].text_bytes, train.sources['b.npy'].text_bytes, train.text_bytes) == (5, 0, 0)


BAD = {
    'tokens with bytes': (['tokens.npy', '--tokenizer', 'bytes'], ['tokens.npy is already tokenized', 'ids:N']),
    'tokens with bpe': (['tokens.npy', '--tokenizer', 'bpe:300'], ['tokens.npy is already tokenized', 'hf:NAME']),
    'tokens with infill': (['tokens.npy', '--tokenizer', 'ids:100', '--fim-rate', '0.5'], ['fill-in-the-middle']),
    'tokens with a filter': (['tokens.npy', '--tokenizer', 'ids:100', '--filter', 'c4'], ['--filter requires text']),
    'an id beyond the vocabulary': (
        ['tokens.npy', '--tokenizer', 'ids:50'],
        ['tokens.npy: token 2', 'is 77', '0 to 49'],
    ),
    'raw tokens without a dtype': (['raw.bin', '--tokenizer', 'ids:100'], ['raw.bin', '--token-dtype']),
    'text with token_dtype': (['x.txt', '--token-dtype', 'uint16'], ['--token-dtype', '--input has none']),
    'text with end_of_document': (['x.txt', '--eod-token', '0'], ['--eod-token', '--input has none']),
    'unknown filter': (['x.txt', '--filter', 'gopher'], ["'gopher'", 'did you mean']),
    'filters that keep nothing': (
        ['x.txt', '--filter', 'gopher_quality'],
        ['removes all 1 documents', "1 for 'gopher_quality: ", 'x.txt (1; bound 50)'],
    ),
    'bad threshold': (['x.txt', '--dedup-threshold', '0'], ['threshold 0']),
    'bad infill': (['x.txt', '--fim-rate', '2'], ['--fim-rate=2']),
    'bad infill_spm': (['x.txt', '--fim-spm-rate', '-1'], ['--fim-spm-rate=-1']),
    'bad retries': (['x.txt', '--retries', '-1'], ['--retries=-1']),
    'address without ray': (['x.txt', '--ray-address', 'a:1'], ['--executor=ray']),
    'a Parquet without the column': (['x.parquet'], ['x.parquet', "no column 'text'", 'body', '--text-field']),
    'truncated gzip': (['x.jsonl.gz'], ['x.jsonl.gz', 'truncated']),
    'truncated Parquet': (['cut.parquet'], ['cut.parquet', 'not a readable Parquet file']),
    'truncated .npy': (['cut.npy', '--tokenizer', 'ids:100'], ['cut.npy']),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_one_line(tmp_path, capsys, case):
    import pyarrow
    import pyarrow.parquet

    arguments, parts = BAD[case]
    at = tmp_path / 'at'
    at.mkdir()
    (at / 'x.txt').write_text('text')
    np.save(at / 'tokens.npy', np.array([1, 2, 77, 99], np.uint16))
    (at / 'cut.npy').write_bytes((at / 'tokens.npy').read_bytes()[:-3])
    (at / 'raw.bin').write_bytes(bytes(20))
    pyarrow.parquet.write_table(pyarrow.table({'body': ['a', 'b']}), at / 'x.parquet')
    (at / 'cut.parquet').write_bytes((at / 'x.parquet').read_bytes()[:-9])
    (at / 'x.jsonl.gz').write_bytes(gzip.compress(json.dumps({'text': prose(1)}).encode())[:-20])
    path, *more = arguments
    assert run('--input', at / path, '--output', at / 'data', '--tokenizer', 'bytes', '--workers', 1, *more) == 2
    assert_error_line(capsys.readouterr().err, *parts)
    assert run('--input', at / 'x.txt', '--output', at / 'data', '--tokenizer', 'bytes', '--workers', 1) == 0


def test_max_files_and_patterns(tmp_path, corpus):
    dataset = prepare(tmp_path, corpus, '--max-files', 7)
    assert sum(split.documents for split in dataset.splits.values()) == 7
    dataset = prepare(tmp_path, f'{corpus}/1*.txt', output='globbed')
    assert sum(split.documents for split in dataset.splits.values()) == 10
