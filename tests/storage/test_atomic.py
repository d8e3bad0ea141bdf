"""Tests atomic writes of files and directories."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from maxlm.errors import InputError
from maxlm.storage.atomic import atomic_write, check_new, check_space, new_directory
from tests.conftest import ROOT


def test_existing_output_is_rejected(tmp_path):
    (tmp_path / 'file').write_text('mine')
    (tmp_path / 'empty').mkdir()
    for path in (tmp_path, tmp_path / 'file'):
        with pytest.raises(InputError, match=f'--output={path}: .*new or empty'):
            check_new('--output', str(path))
    with pytest.raises(InputError, match=f'--output=.*: {tmp_path}/file is not a directory'):
        check_new('--output', str(tmp_path / 'file' / 'below'))
    assert check_new('--output', str(tmp_path / 'empty')) == tmp_path / 'empty'
    assert check_new('--output', str(tmp_path / 'new' / 'deep')) == tmp_path / 'new' / 'deep'


@pytest.mark.parametrize('name', ['new', 'deep/er', 'empty', 'link'])
def test_directory_appears_after_completion(tmp_path, name):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'empty')
    directory = check_new('--output', str(tmp_path / name))
    with new_directory('--output', directory) as partial:
        (partial / 'x').write_text('1')
        assert not (directory / 'x').exists()
    assert (tmp_path / name / 'x').read_text() == '1'
    assert not list(tmp_path.rglob('*.partial'))
    # Permissions are those of an ordinary directory, not of a private directory.
    (tmp_path / 'control').mkdir()
    assert directory.stat().st_mode == (tmp_path / 'control').stat().st_mode


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, OSError])
def test_error_leaves_no_files(tmp_path, error):
    (tmp_path / 'other').mkdir()

    def fill():
        with new_directory('--output', tmp_path / 'a' / 'b') as partial:
            (partial / 'x').write_text('1')
            raise error(28, 'No space left on device')

    with pytest.raises(InputError if error is OSError else error):
        fill()
    assert os.listdir(tmp_path) == ['other']


def test_disk_space_check(tmp_path, monkeypatch):
    paths = []

    def disk_usage(path):
        paths.append(path)
        return SimpleNamespace(free=5 * 10**9)

    monkeypatch.setattr(shutil, 'disk_usage', disk_usage)
    check_space('--output', tmp_path / 'not' / 'there', 4 * 10**9)
    assert paths == [tmp_path]
    with pytest.raises(InputError, match=r'--output=.*needs 6\.\d\d GiB of disk space, but only 4\.66 GiB are free'):
        check_space('--output', Path(tmp_path / 'x'), 7 * 10**9)


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / 'deep' / 'a'
    with pytest.raises(InputError, match='deep/a: cannot be written: No such file'):
        atomic_write(path, b'old')
    atomic_write(path, 'größe', make_parents=True)

    def fail(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(InputError, match='deep/a: cannot be written: No space left'):
        atomic_write(path, b'new')
    assert path.read_text() == 'größe'
    assert list(path.parent.iterdir()) == [path]


WRITER = """
import sys
from pathlib import Path
from maxlm.storage.atomic import new_directory

with new_directory('--output', Path(sys.argv[1])) as partial:
    (partial / 'file').write_text('partial')
    print('writing', flush=True)
    sys.stdin.read()
"""


@pytest.mark.multiprocess
def test_what_killed_processes_left_is_deleted(tmp_path):
    output = tmp_path / 'model[1]'

    def start():
        words = [sys.executable, '-c', WRITER, str(output)]
        process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == 'writing\n'
        return process

    with start() as killed, start() as running:
        killed.kill()
        killed.wait()
        # Control: files of other outputs.
        for name in ('.model.1.partial', '.model[1].other', 'model[1].1.partial'):
            (tmp_path / name).mkdir()
        before = set(tmp_path.iterdir())
        assert check_new('--output', str(output)) == output
        [deleted] = before - set(tmp_path.iterdir())
        assert deleted.name == f'.model[1].{killed.pid}.partial'
        # The running process is not disturbed.
        running.stdin.close()
        assert running.wait(30) == 0
    assert (output / 'file').read_text() == 'partial'
