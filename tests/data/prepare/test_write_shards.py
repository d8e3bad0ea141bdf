import dataclasses

import numpy as np
import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.prepare import partitions as partitions_module
from maxlm.data.prepare.choose_validation import ValidationChoice
from maxlm.data.prepare.partitions import ReadSettings, make_partitions
from maxlm.data.prepare.train_val_split import HASH_RANGE, name_hash
from maxlm.data.prepare.write_shards import WriteShards, find_leftover_files
from maxlm.data.tokenizer.fim import FimConfig
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError


@pytest.fixture
def task(tmp_path):
    """Returns a task with thirty byte documents, half of them for validation."""
    texts, output = tmp_path / 'texts', tmp_path / 'data'
    texts.mkdir()
    (output / 'work').mkdir(parents=True)
    for i in range(30):
        (texts / f'{i}.txt').write_text(f'text number {i} größe')
    (partition,) = make_partitions(find_inputs([texts]), [])
    tokenizer = bytes_tokenizer(infill=True)
    tokenizer.save(output / 'tokenizer.json')
    return WriteShards(
        output=output,
        work=output / 'work',
        partition=partition,
        reading=ReadSettings(ReadOptions(), skip_bad=False),
        decisions=None,
        filters=(),
        validation=ValidationChoice(HASH_RANGE // 2),
        tokenizer_sha256=tokenizer.sha256,
        infill=None,
        block=16,
    )


def write(task):
    progress = []
    task.run(lambda *new: progress.append(new))
    result = task.load()
    assert result is not None
    return result, tuple(map(sum, zip(*progress, strict=True)))


def test_the_counts_match_the_written_shards(task):
    result, progress = write(task)
    below = [i for i in range(30) if name_hash(f'{i}.txt') < HASH_RANGE // 2]
    validation, train = result.splits['validation'], result.splits['train']
    assert (validation.shard.documents, train.shard.documents) == (len(below), 30 - len(below))
    assert validation.text_bytes == sum(len(f'text number {i} größe'.encode()) for i in below)
    for split in (validation, train):
        assert split.token_counts.sum() == split.shard.tokens == split.text_bytes + split.shard.documents
        assert split.token_counts[256] == split.shard.documents
        assert split.shard.source == 'texts'
    assert progress == (task.size, 30, train.shard.tokens + validation.shard.tokens)
    assert result.duplicates.documents == 0


def test_the_bytes_do_not_depend_on_the_batch_size(task, monkeypatch):
    def shards():
        task.run(lambda *_: None)
        return [task.shard_path(name).read_bytes() for name in ('train', 'validation')]

    expected = shards()
    monkeypatch.setattr(partitions_module, 'BATCH_CHARACTERS', 1)
    assert shards() == expected
    monkeypatch.undo()
    task = dataclasses.replace(task, infill=FimConfig(1.0, 0.5))
    assert shards() != expected


def test_a_result_is_valid_only_for_the_same_task(task):
    write(task)
    assert task.is_done()
    others = {
        'partition': dataclasses.replace(task.partition, number=0, is_validation=True),
        'reading': ReadSettings(ReadOptions(), skip_bad=True),
        'validation': ValidationChoice(0),
        'tokenizer_sha256': 'x',
        'infill': FimConfig(),
        'block': 17,
    }
    for name, value in others.items():
        assert not dataclasses.replace(task, **{name: value}).is_done(), name
    # The task is not finished if a shard is truncated.
    with task.shard_path('train').open('r+b') as file:
        file.truncate(100)
    assert not task.is_done()
    write(task)
    task.shard_path('validation').unlink()
    assert not task.is_done()


def test_a_replaced_tokenizer_is_detected(task):
    with pytest.raises(InputError, match=r'tokenizer\.json: removed or changed'):
        dataclasses.replace(task, tokenizer_sha256='x').run(lambda *_: None)
    assert not list(task.output.glob('*.arrayrecord'))


def test_token_counts_of_a_large_vocabulary_are_compact(task):
    result, _ = write(task)
    large = dataclasses.replace(result.splits['train'], token_counts=np.arange(200_000) % 7)
    from maxlm.data.prepare.write_shards import _from_fields, _to_fields

    fields = _to_fields(large)
    assert len(fields['token_counts']) < 50_000
    assert np.array_equal(_from_fields(fields).token_counts, large.token_counts)


def test_leftover_shards_of_earlier_runs_are_found(task):
    result, _ = write(task)
    (task.output / 'train-00009.arrayrecord').write_text('old')
    (task.output / 'mine.arrayrecord').write_text('not ours')
    kept = [split.shard for split in result.splits.values()]
    assert find_leftover_files(task.output, kept) == [task.output / 'train-00009.arrayrecord']
