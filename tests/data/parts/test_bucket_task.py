"""Tasks on other machines: their local files must be those of the first machine."""

import dataclasses

import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.parts import bucket_task
from maxlm.data.parts.bucket_task import BucketTask
from maxlm.data.prepare.partitions import ReadSettings, make_partitions
from maxlm.data.prepare.scan import Cleaning, ScanTask
from maxlm.errors import InputError
from maxlm.storage.bucket import Bucket


@pytest.fixture
def task(gcs, tmp_path):
    """Returns a task that scans a text, with the evaluation texts of a filter."""
    (tmp_path / 'x.txt').write_text('one two three')
    (tmp_path / 'evaluation.txt').write_text('a question of an evaluation set that has nine words')
    filters = (f'decontaminate:{tmp_path / "evaluation.txt"}',)
    (partition,) = make_partitions(find_inputs([str(tmp_path / 'x.txt')]), [])
    scan = ScanTask(tmp_path, partition, ReadSettings(ReadOptions(), False), Cleaning(filters, 'exact', 0.8))
    return BucketTask('gs://bucket/web', scan)


def names():
    return sorted(Bucket('gs://bucket/web').list())


def test_a_result_is_written_once_after_its_files(gcs, task, monkeypatch):
    uploads, progress = [], []
    upload = bucket_task.upload_file
    monkeypatch.setattr(
        bucket_task, 'upload_file', lambda bucket, name, path: [uploads.append(name), upload(bucket, name, path)]
    )
    task.run(lambda *new: progress.append(new))
    assert uploads == ['.prepare/signatures-00000', '.prepare/survey-00000.json'] == names()
    # A second machine with the same task does nothing, unless a file is lost.
    task.run(lambda *new: progress.append(new))
    assert len(uploads) == 2
    assert [new[0] for new in progress] == [task.size] * 2
    Bucket('gs://bucket/web').delete(['.prepare/signatures-00000'])
    task.run(lambda *_: None)
    assert len(uploads) == 4
    assert len(names()) == 2


def test_a_result_of_another_task_is_removed_first(gcs, task, monkeypatch):
    other = dataclasses.replace(task.task, reading=ReadSettings(ReadOptions(), True))
    BucketTask(task.url, other).run(lambda *_: None)

    def fail(bucket, name, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(bucket_task, 'upload_file', fail)
    with pytest.raises(KeyboardInterrupt):
        task.run(lambda *_: None)
    assert names() == ['.prepare/signatures-00000']


def test_other_versions_are_refused(gcs, task):
    with pytest.raises(InputError, match=r'has tokenizers [\d.]+ instead of 0\.1 as on .*; install the same versions'):
        dataclasses.replace(task, versions={**task.versions, 'tokenizers': '0.1'}).run(lambda *_: None)
    with pytest.raises(InputError, match=r'has other \(missing\) instead of 1'):
        dataclasses.replace(task, versions={'other': '1'}).run(lambda *_: None)
    assert names() == []


@pytest.mark.parametrize('name', ['x.txt', 'evaluation.txt'])
def test_other_local_files_are_refused(gcs, task, tmp_path, name):
    (tmp_path / name).write_text('another text with another number of bytes, which is longer')
    with pytest.raises(InputError, match=rf'{name}.* on .*; (use inputs that|copy the same files to) all machines'):
        task.run(lambda *_: None)
    assert names() == []
    (tmp_path / 'x.txt').unlink()
    with pytest.raises(InputError, match=rf'x.txt: No such file|{name}'):
        task.run(lambda *_: None)
