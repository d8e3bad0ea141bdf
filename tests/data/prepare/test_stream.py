"""Tests `maxlm prepare --stream`: its shards, its validation split, and what it announces while it runs."""

import contextlib
import json

import pytest

from maxlm.data.dataset import preparation
from maxlm.data.dataset.preparation import PARTIAL_MANIFEST, Announcer, is_preparing, read_progress, stop_reason
from maxlm.data.dataset.records import load_manifest
from maxlm.data.prepare import partitions
from maxlm.data.prepare.choose_validation import stream_fraction
from maxlm.errors import InputError
from tests.preparing import contents, run
from tests.stepped_preparation import NUM_PARTITIONS, stepped, write_lines


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, 'GROUPS', NUM_PARTITIONS)
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 1)
    return write_lines(tmp_path / 'texts')


def prepared(texts, output, *options):
    assert run('--input', texts, '--output', output, '--tokenizer', 'bytes', '--quiet', '--workers', 1, *options) == 0
    return load_manifest(output)


def test_the_announced_shards_are_the_first_shards_of_the_data_set(texts, tmp_path, monkeypatch):
    found = []
    with stepped(monkeypatch, texts, tmp_path / 'data') as steps:
        for _ in range(NUM_PARTITIONS - 1):
            steps.step()
            found.append(load_manifest(steps.output, name=PARTIAL_MANIFEST))
        assert is_preparing(steps.output)
        assert json.loads(read_progress(steps.output))['bytes'] > 0
        assert steps.finish() == 0
    dataset = load_manifest(tmp_path / 'data')
    shards = dataset.splits['train'].shards
    assert [len(partial.splits['train'].shards) for partial in found] == list(range(1, len(found) + 1))
    for partial in found:
        train = partial.splits['train']
        assert train.shards == shards[: len(train.shards)]
        assert train.tokens == sum(shard.tokens for shard in train.shards)
        assert partial.splits['validation'] == dataset.splits['validation']
        assert partial.order_fingerprint == dataset.order_fingerprint != dataset.fingerprint
    # Nothing of the announcements remains, and the data are those of a preparation without interruption.
    prepared(texts, tmp_path / 'again', '--stream')
    assert contents(tmp_path / 'data') == contents(tmp_path / 'again')
    other = prepared(write_lines(tmp_path / 'others', seed=1), tmp_path / 'other', '--stream')
    assert other.order_fingerprint != dataset.order_fingerprint


def test_validation_documents_come_from_the_first_partition(texts, tmp_path):
    dataset = prepared(texts, tmp_path / 'stream', '--stream', '--validation-fraction', 0.05)
    assert [shard.name for shard in dataset.splits['validation'].shards] == ['validation-00000.arrayrecord']
    # They are about the fraction of all documents, so more than that of the first partition.
    documents = dataset.splits['validation'].documents
    assert 1 <= documents <= 0.05 * 8 * NUM_PARTITIONS + 2
    usual = prepared(texts, tmp_path / 'usual', '--validation-fraction', 0.2)
    assert len(usual.splits['validation'].shards) > 1
    assert not usual.is_streamed
    assert usual.order_fingerprint == usual.fingerprint


@pytest.mark.parametrize(
    ('size', 'total', 'share'),
    [(100, 100, 0.01), (100, 1000, 0.1), (100, 10**6, 0.5), (2**28, 2**40, 0.0625), (0, 0, 0.01)],
)
def test_the_share_of_the_first_partition(size, total, share):
    assert stream_fraction(0.01, size, total) == pytest.approx(share)


def test_validation_files_are_announced_with_the_first_shard(texts, tmp_path, monkeypatch):
    held_out = tmp_path / 'held out.txt'
    held_out.write_text('held out text ' * 50)
    with stepped(monkeypatch, texts, tmp_path / 'data', '--validation', str(held_out)) as steps:
        # The first permission is for the validation files.
        steps.release()
        steps.step()
        partial = load_manifest(steps.output, name=PARTIAL_MANIFEST)
        assert len(partial.splits['train'].shards) == 1
        assert steps.finish() == 0
    validation = load_manifest(tmp_path / 'data').splits['validation']
    assert partial.splits['validation'] == validation
    assert validation.documents == 1


def test_other_options_do_not_continue_a_preparation(texts, tmp_path, monkeypatch, capsys):
    with stepped(monkeypatch, texts, tmp_path / 'data') as steps:
        steps.step()
        steps.stop(KeyboardInterrupt())
    assert stop_reason(tmp_path / 'data') == 'was interrupted'
    arguments = ['--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bytes', '--quiet', '--workers', 1]
    capsys.readouterr()
    assert run(*arguments) == 2
    assert 'contains a data set made from stream True, not None; choose another --output' in capsys.readouterr().err
    assert run(*arguments, '--stream') == 0
    # The complete data set does not change its order either.
    assert run(*arguments) == 2
    assert run(*arguments, '--stream') == 0


def test_progress_is_written_at_intervals(tmp_path, monkeypatch):
    with Announcer(tmp_path) as announcer:
        announcer.progress(3)
        announcer.progress(4)
        assert json.loads(read_progress(tmp_path)) == {'bytes': 3}
        monkeypatch.setattr(preparation, 'PROGRESS_SECONDS', 0)
        announcer.progress(5)
        assert json.loads(read_progress(tmp_path)) == {'bytes': 12}
        assert is_preparing(tmp_path)
    assert not is_preparing(tmp_path)
    with contextlib.suppress(InputError), Announcer(tmp_path):
        assert read_progress(tmp_path) == ''
        raise InputError('x.txt: damaged\n')
    assert stop_reason(tmp_path) == 'failed: x.txt: damaged'
