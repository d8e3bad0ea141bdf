import json

import numpy as np
import pytest

from maxlm.data.documents.document import Document
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.filters.base import FilterResult
from maxlm.data.filters.report import CleaningReport
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.prepare.build_manifest import assemble, without_duplicates
from maxlm.data.prepare.choose_validation import ValidationChoice
from maxlm.data.prepare.partitions import ReadSettings, make_partitions
from maxlm.data.prepare.write_shards import WriteShards
from maxlm.data.tokenizer.tokenizer import ids_tokenizer
from maxlm.errors import InputError


@pytest.fixture
def tasks(tmp_path):
    """Returns the tasks of a text source, a token source and an empty source."""
    (tmp_path / 'a.txt').write_text('1 1 2')
    np.save(tmp_path / 'b.npy', np.array([3, 3, 9, 4, 9], np.uint16))
    (tmp_path / 'c.txt').touch()
    output = tmp_path / 'data'
    (output / 'work').mkdir(parents=True)
    tokenizer = ids_tokenizer(10, 9)
    tokenizer.save(output / 'tokenizer.json')
    reading = ReadSettings(ReadOptions(end_of_document=9, vocab_size=10), skip_bad=False)
    partitions = make_partitions(find_inputs([tmp_path / 'a.txt', tmp_path / 'b.npy', tmp_path / 'c.txt']), [])
    tasks = [
        WriteShards(
            output, output / 'work', partition, reading, None, (), ValidationChoice(0), tokenizer.sha256, None, 8
        )
        for partition in partitions
    ]
    for task in tasks:
        task.run(lambda *_: None)
    return tasks


def manifest(tasks, **options):
    dataset, _ = assemble(
        tasks, ids_tokenizer(10, 9), tokenizer_kind='ids', made_from={'a': 1}, output=tasks[0].output, **options
    )
    return dataset


def test_the_counts_add_up(tasks):
    dataset = manifest(tasks, left_out=[{'name': 'group 7', 'reason': 'gone'}])
    train = dataset.splits['train']
    assert (train.documents, train.tokens) == (3, 9)
    assert [shard.source for shard in train.shards] == ['a.txt', 'b.npy']
    assert {name: (counts.documents, counts.tokens) for name, counts in train.sources.items()} == {
        'a.txt': (1, 4),
        'b.npy': (2, 5),
    }
    p = np.array([2, 1, 2, 1, 3]) / 9
    assert train.unigram_entropy == pytest.approx(-(p * np.log(p)).sum())
    assert dataset.splits['validation'].shards == ()
    assert dataset.left_out == ({'name': 'group 7', 'reason': 'gone'},)
    assert json.loads(json.dumps(dataset.made_from)) == {'a': 1}


def test_unknown_byte_counts(tasks):
    train = manifest(tasks).splits['train']
    assert train.text_bytes == 0
    assert {name: counts.text_bytes for name, counts in train.sources.items()} == {'a.txt': 5, 'b.npy': 0}
    # For the text source alone, the bytes are known.
    assert manifest([tasks[0], tasks[2]]).splits['train'].text_bytes == 5


def test_missing_results_are_named(tasks):
    tasks[1].result_path.unlink()
    with pytest.raises(InputError, match=r'group-00001\.json: removed or changed'):
        manifest(tasks)
    with pytest.raises(InputError, match='no document to train on'):
        manifest(tasks[2:])


def test_duplicates_are_subtracted_from_documents_kept_by_filters():
    first, second, third = (Document(name, 's', text) for name, text in (('a', 'xx'), ('b', 'yyyy'), ('c', 'zzzzzz')))
    filtered, duplicates = CleaningReport(), CleaningReport()
    filtered.count(first, first)
    filtered.count(second, FilterResult('code: lines', 'd'))
    filtered.count(third, Document('c', 's', 'zzz'))
    duplicates.count(Document('c', 's', 'zzz'), FilterResult('duplicate: exact', 'a'))
    duplicates.shortened_documents = 1
    report = without_duplicates(filtered, duplicates)
    assert (report.documents, report.bytes) == (3, 12)
    assert (report.kept_documents, report.kept_bytes, report.shortened_documents) == (1, 2, 0)
    assert list(report.removed) == ['code: lines', 'duplicate: exact']
