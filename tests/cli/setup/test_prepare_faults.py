"""Failures during preparation: storage, processes, disk, and changed files."""

from __future__ import annotations

import contextlib
import io
import resource
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from maxlm.data.dataset.records import load_manifest
from maxlm.data.executors.executor import run_tasks
from maxlm.data.formats import text
from maxlm.data.parts.part_store import WORK_DIRECTORY
from maxlm.data.prepare import partitions, pipeline, scan, write_shards
from maxlm.data.prepare.write_shards import WriteShards
from maxlm.storage.errors import classify_error
from tests.messages import assert_error_line
from tests.preparing import contents, documents_of, run, write_texts


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / 'texts')


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch):
    """Creates partitions of about 1000 bytes, and removes pauses between attempts."""
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 1000)
    monkeypatch.setattr(
        pipeline, 'run_tasks', lambda *args, **options: run_tasks(*args, **options, sleep=lambda _: None)
    )


@pytest.fixture
def fail(monkeypatch):
    """Returns a function that makes the first reads of a named file fail."""

    def make(name, times):
        left = [times]
        read = text.filesystem.read_bytes

        def read_bytes(path):
            if Path(path).name == name and left[0] > 0:
                left[0] -= 1
                raise classify_error(str(path), TimeoutError())
            return read(path)

        monkeypatch.setattr(text.filesystem, 'read_bytes', read_bytes)

    return make


ARGUMENTS = ('--tokenizer', 'bytes', '--workers', 1, '--validation-fraction', 0, '--quiet')


def test_a_temporary_storage_failure_skips_nothing(texts, tmp_path, fail):
    assert run('--input', texts, *ARGUMENTS, '--output', tmp_path / 'expected') == 0
    fail('25.txt', 2)
    assert run('--input', texts, *ARGUMENTS, '--skip-bad-records', '--output', tmp_path / 'data') == 0
    # Even with --skip-bad-records, no document is skipped.
    dataset = load_manifest(tmp_path / 'data')
    assert dataset.left_out == ()
    assert dataset.fingerprint == load_manifest(tmp_path / 'expected').fingerprint


@pytest.mark.parametrize('more', [(), ('--deduplicate', 'exact')], ids=['shards', 'survey'])
def test_a_partition_that_always_fails(texts, tmp_path, fail, capsys, more):
    command = ['--input', texts, *ARGUMENTS, *more, '--output', tmp_path / 'data']
    fail('25.txt', 10**6)
    assert run(*command, '--retries', 1) == 2
    assert_error_line(capsys.readouterr().err, '(tried 2 times)', 'no answer (timed out)', '--skip-failed')
    finished = 'survey-*' if more else 'group-*'
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / 'data' / WORK_DIRECTORY).glob(finished)}
    assert len(done) > 10
    assert not (tmp_path / 'data' / 'dataset.json').exists()

    assert run(*command, '--retries', 1, '--skip-failed') == 0
    dataset = load_manifest(tmp_path / 'data')
    assert len(dataset.left_out) == 1
    assert dataset.left_out[0]['name'].startswith('partition ')
    assert 'no answer (timed out)' in dataset.left_out[0]['reason']
    found = documents_of(dataset, 'train')
    assert (texts / '25.txt').read_bytes().decode() not in found
    assert 40 <= len(found) < 50
    # Failed files are only skipped with the option.
    assert run(*command, '--skip-failed') == 0
    capsys.readouterr()
    assert run(*command) == 2
    assert 'lacks 1 partitions that failed' in capsys.readouterr().err


def test_finished_partitions_are_not_repeated_after_a_failure(texts, tmp_path, fail, monkeypatch):
    command = ['--input', texts, *ARGUMENTS, '--output', tmp_path / 'data']
    assert run(*command[:-1], tmp_path / 'expected') == 0
    with monkeypatch.context() as patch:
        read = text.filesystem.read_bytes
        fail('25.txt', 10**6)
        assert run(*command, '--retries', 0) == 2
        patch.setattr(text.filesystem, 'read_bytes', read)
        written = []
        write = WriteShards.run
        patch.setattr(WriteShards, 'run', lambda task, report: [written.append(task), write(task, report)])
        assert run(*command) == 0
    assert len(written) == 1
    assert contents(tmp_path / 'data') == contents(tmp_path / 'expected')


def objects(kind):
    """Returns three objects with one line or row each."""
    for i in range(3):
        if kind == 'parquet':
            stream = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.table({'text': [f'text {i}']}), stream)
            yield f'{i}.parquet', stream.getvalue()
        else:
            yield f'{i}.jsonl', b'{"text": "text %d"}\n' % i


@pytest.mark.parametrize(
    ('kind', 'fault'), [('jsonl', 503), ('parquet', 'reset'), ('jsonl', 'vanish'), ('jsonl', 403), ('parquet', 403)]
)
def test_a_bucket_that_fails(tmp_path, monkeypatch, gcs, kind, fault):
    # Creates several partitions; each line of JSONL is a range.
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 10)
    for name, content in objects(kind):
        gcs.put('bucket', f'x/{name}', content)
    command = ['--input', 'gs://bucket/x', *ARGUMENTS, '--skip-bad-records', '--output']
    assert run(*command, tmp_path / 'expected') == 0
    write = WriteShards.run

    def break_and_write(task, report):
        if not pauses:
            gcs.vanish() if fault == 'vanish' else gcs.fault(fault, f'x/2.{kind}')
        write(task, report)

    def repair(seconds):
        pauses.append(seconds)
        gcs.faults.clear()
        if fault == 'vanish':
            gcs.appear()

    pauses: list[float] = []
    monkeypatch.setattr(WriteShards, 'run', break_and_write)
    monkeypatch.setattr(pipeline, 'run_tasks', lambda *args, **options: run_tasks(*args, **options, sleep=repair))
    assert run(*command, tmp_path / 'data') == 0
    dataset = load_manifest(tmp_path / 'data')
    if fault == 403:
        # Negative control: permanent failures are skipped if allowed, and reported once.
        assert not pauses
        assert [entry['name'] for entry in dataset.left_out] == [f'2.{kind}']
        assert dataset.splits['train'].documents == 2
    else:
        assert pauses == [1.0]
        assert contents(tmp_path / 'data') == contents(tmp_path / 'expected')


@contextlib.contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """Limits files of this process and its children to `limit` bytes, which simulates a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize('workers', [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_a_disk_that_fills(tmp_path, capfd, workers):
    texts = tmp_path / 'texts'
    texts.mkdir()
    # Two partitions, of which the second exceeds the limit with two bytes per letter.
    (texts / 'a.txt').write_text('small ' * 2**14)
    (texts / 'b.txt').write_text('large ' * 2**15)
    command = ['--input', texts, '--tokenizer', 'bytes', '--validation-fraction', 0]
    assert run(*command, '--workers', 1, '--output', tmp_path / 'expected') == 0
    command += ['--output', tmp_path / 'data']
    capfd.readouterr()
    with largest_file(400_000):
        # With one worker, the first partition finishes.
        assert run(*command, '--workers', 1) == 2
        error = capfd.readouterr().err
        assert error.count('\n') == 1
        assert 'cannot be written' in error
        assert 'File too large' in error
        assert not [path for path in (tmp_path / 'data').rglob('*.partial')]
        kept = tmp_path / 'data' / 'train-00000.arrayrecord'
        before = kept.stat().st_mtime_ns
        assert run(*command, '--workers', workers) == 2
    assert run(*command, '--workers', workers) == 0
    assert kept.stat().st_mtime_ns == before
    assert contents(tmp_path / 'data') == contents(tmp_path / 'expected')


@pytest.mark.parametrize('change', ['longer', 'gone'])
def test_a_file_that_changes_between_two_reads(texts, tmp_path, monkeypatch, capsys, change):
    deduplicate = scan.deduplicate

    def change_and_deduplicate(*arguments):
        if change == 'longer':
            (texts / '25.txt').write_text('another text of another length')
        else:
            (texts / '25.txt').unlink()
        return deduplicate(*arguments)

    monkeypatch.setattr(pipeline, 'deduplicate', change_and_deduplicate)
    command = [
        '--input',
        texts,
        *ARGUMENTS,
        '--deduplicate',
        'exact',
        '--skip-bad-records',
        '--output',
        tmp_path / 'data',
    ]
    assert run(*command) == 2
    assert_error_line(capsys.readouterr().err, 'changed while maxlm prepare was running')
    monkeypatch.undo()
    assert run(*command) == 0


def first_of(directory):
    return (directory / 'train-00000.arrayrecord').read_bytes()


def test_results_of_other_options_are_not_reused(texts, tmp_path, monkeypatch):
    """Two configurations with shards of equal size: results of the interrupted first run must not be reused."""
    command = ['--input', texts, *ARGUMENTS, '--fim-rate', 1, '--output', tmp_path / 'data']
    other = [*command, '--fim-spm-rate', 0]
    command += ['--fim-spm-rate', 1]
    assert run(*command, '--output', tmp_path / 'expected') == 0
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, 'assemble', lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*command) == 130
    with monkeypatch.context() as patch:
        # Simulates a kill between writing a shard and its result.
        patch.setattr(write_shards, 'save_result', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*other) == 130
    # Negative control: the first shard differs and has the same size.
    first, expected = first_of(tmp_path / 'data'), first_of(tmp_path / 'expected')
    assert first != expected
    assert len(first) == len(expected)
    assert run(*command) == 0
    assert contents(tmp_path / 'data') == contents(tmp_path / 'expected')


@pytest.mark.parametrize('lost', ['train-00001.arrayrecord', 'tokenizer.json', f'{WORK_DIRECTORY}/group-00001.json'])
def test_lost_files_are_written_again(texts, tmp_path, monkeypatch, lost):
    command = ['--input', texts, *ARGUMENTS, '--output', tmp_path / 'data']
    assert run(*command[:-1], tmp_path / 'expected') == 0
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, 'assemble', lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*command) == 130
    (tmp_path / 'data' / lost).unlink()
    assert run(*command) == 0
    assert contents(tmp_path / 'data') == contents(tmp_path / 'expected')
