"""Tests the free space and write speed of a run's disk."""

import dataclasses

import pytest

from maxlm.diagnostics.checks import disk
from maxlm.diagnostics.checks.disk import check_disk, evaluate_disk, measure_write_speed, nearest_directory
from maxlm.diagnostics.result import CheckStatus
from tests.diagnostics.machines import CPU, GIB, case_on
from tests.small import small_config


@pytest.mark.parametrize(
    ('facts', 'status', 'words'),
    [
        ({}, 'ok', '100.0 GiB free, writes 500.0 MB/s; a checkpoint of 5.00 GiB takes 10.7 s'),
        ({'free': GIB // 2}, 'failure', '512.0 MiB free'),
        ({'free': 20 * GIB}, 'failure', 'and up to 7 checkpoints are kept'),
        ({'free': 20 * GIB, 'num_kept': 0}, 'ok', '20.0 GiB free'),
        ({'min_free': 101 * GIB}, 'failure', 'less than --min-free-gib=101'),
        ({'free': 5 * GIB, 'checkpoint': 0}, 'warning', '5.00 GiB free'),
        ({'inodes': 9}, 'warning', 'only 9 more files can be created'),
        ({'inodes': 0}, 'ok', '100.0 GiB'),
        ({'speed': 5e6}, 'warning', 'writes 5.00 MB/s'),
    ],
)
def test_evaluation_of_facts(tmp_path, facts, status, words):
    sound = {'free': 100 * GIB, 'inodes': 10**6, 'speed': 5e8, 'checkpoint': 5 * GIB, 'num_kept': 7}
    found = evaluate_disk(tmp_path, **{**sound, **facts})
    assert found.status == status, found
    assert words in found.message


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(disk, 'WRITTEN_BYTES', 2**16)
    monkeypatch.setattr(disk, 'CHUNK_BYTES', 2**16)


def test_no_files_remain(tmp_path, little):
    assert measure_write_speed(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []
    assert check_disk(case_on(CPU, workdir=str(tmp_path / 'runs/new'))).message.startswith(f'{tmp_path}: ')
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written(tmp_path, little, monkeypatch):
    def full(directory):
        raise OSError(28, 'No space left on device', str(directory))

    monkeypatch.setattr(disk, 'measure_write_speed', full)
    found = check_disk(case_on(CPU, workdir=str(tmp_path)))
    assert (found.status, found.message) == (CheckStatus.FAILURE, f'{tmp_path}: No space left on device')


def test_checkpoints_that_will_not_fit(tmp_path, little, monkeypatch):
    config = small_config(checkpoint__max_to_keep=3)
    monkeypatch.setattr(disk, 'checkpoint_bytes', lambda config: 2**56)
    assert check_disk(case_on(CPU, config=config, workdir=str(tmp_path))).status is CheckStatus.FAILURE
    # A size limit counts two checkpoints at least, because the previous one is kept during a save.
    for limit, kept in ((2.0**29, 5), (2.0**27, 2), (1.0, 2)):
        limited = small_config(checkpoint__max_to_keep=3, checkpoint__keep_best=1, checkpoint__max_gib=limit)
        found = check_disk(case_on(CPU, config=limited, workdir=str(tmp_path)))
        assert f'and up to {kept} checkpoints are kept' in found.message
    # The bucket itself has enough space.
    assert check_disk(case_on(CPU, config=config, workdir='gs://bucket/run')).status is not CheckStatus.FAILURE


def test_the_directory_that_a_run_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nearest_directory(case_on(CPU)) == tmp_path
    assert nearest_directory(case_on(CPU, workdir='some/where')) == tmp_path
    config = small_config()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=str(tmp_path / 'cache')))
    (tmp_path / 'cache').mkdir()
    assert nearest_directory(case_on(CPU, config=config, workdir='s3://bucket/run')) == tmp_path / 'cache'
