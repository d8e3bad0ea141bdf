"""Tests the upload of a run's small files: which files another machine needs, and which files each process uploads."""

import pytest

from maxlm.workdir.file_uploads import NAMES
from maxlm.workdir.run_storage import RunStorage

FAST = {'poll_seconds': 0.01, 'files_seconds': 0.0}
LINE = '{"life": 1}\n'


def write(workdir, *names):
    for name in names:
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(LINE)


def test_log_files_are_uploaded_and_downloaded(url, bucket, tmp_path):
    others = ['report.html', 'tensorboard/events.1', 'profile/plugins/x/trace.pb', 'wandb/run-1/run.wandb']
    write(tmp_path / 'a', *NAMES, *others, 'goodput-1.jsonl', 'notes.txt')
    (tmp_path / 'a' / 'wandb' / 'latest').symlink_to('run-1/run.wandb')
    with RunStorage(tmp_path / 'a', url, **FAST):
        pass
    # Unknown files and files that another process uploads are not uploaded.
    assert set(bucket.list()) == {*NAMES, *others}
    storage = RunStorage(tmp_path / 'b', url)
    storage.fetch()
    found = {path.relative_to(tmp_path / 'b').as_posix() for path in (tmp_path / 'b').rglob('*') if path.is_file()}
    assert found - {'.mirror/record.json'} == set(NAMES)
    assert {'events.jsonl', 'goodput.jsonl', 'devices.jsonl', 'samples.jsonl'} < found


def test_other_processes_upload_their_own_files(url, bucket, tmp_path):
    write(tmp_path, 'goodput.jsonl', 'goodput-1.jsonl', 'goodput-3.jsonl', 'devices-3.jsonl', 'run.log')
    with RunStorage(tmp_path, url, process=3, **FAST) as storage:
        pass
    assert set(bucket.list()) == {'goodput-3.jsonl', 'devices-3.jsonl'}
    assert not storage.is_uploaded(1)
    write(tmp_path, 'events.jsonl')
    storage.fetch()
    assert set(bucket.list()) == {'goodput-3.jsonl', 'devices-3.jsonl'}


@pytest.mark.parametrize('process', [0, 2])
def test_last_lines_are_uploaded_after_close(url, bucket, tmp_path, process):
    name = f'goodput-{process}.jsonl' if process else 'goodput.jsonl'
    write(tmp_path, name)
    with RunStorage(tmp_path, url, process=process, **FAST) as storage:
        pass
    (tmp_path / name).write_text(LINE * 2)
    assert bucket.read(name).decode() == LINE
    storage.upload_last_files()
    assert bucket.read(name).decode() == LINE * 2


def test_missing_bucket_at_the_end_causes_no_error(gcs, tmp_path, log):
    write(tmp_path, 'goodput.jsonl')
    with RunStorage(tmp_path, 'gs://bucket/runs/one', **FAST) as storage:
        pass
    write(tmp_path, 'events.jsonl')
    gcs.buckets.clear()
    storage.upload_last_files()
    assert [line for line in log() if 'the last log lines are not uploaded and only in' in line]


def test_a_run_without_a_bucket_uploads_nothing(tmp_path):
    with RunStorage(tmp_path) as storage:
        write(tmp_path, 'goodput.jsonl')
    storage.upload_last_files()
    assert [path.name for path in tmp_path.iterdir()] == ['goodput.jsonl']
