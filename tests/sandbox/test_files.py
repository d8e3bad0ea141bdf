"""Tests the removal of directories that resist removal."""

import os
from pathlib import Path

from maxlm.sandbox.files import exceeds_limits, remove
from maxlm.sandbox.limits import SandboxLimits


def test_any_directory_is_removed(tmp_path):
    kept = tmp_path / 'kept'
    kept.write_text('x')
    folder = tmp_path / 'folder'
    folder.mkdir()
    here = os.getcwd()
    os.chdir(folder)
    try:
        os.symlink(tmp_path, 'out')
        os.symlink('nowhere', 'broken')
        os.mkfifo('pipe')
        os.mkdir('closed', 0)
        # The path is longer than the system's limit, and deeper than the recursion limit.
        for _ in range(1500):
            os.mkdir('d' * 200)
            os.chdir('d' * 200)
        Path('deep').write_text('x')
    finally:
        os.chdir(here)
    remove(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['kept']
    remove(str(folder))


def test_limits_of_a_directory(tmp_path):
    limits = SandboxLimits(files=10, disk_bytes=1 << 20)
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'b').write_bytes(b'x' * (1 << 19))
    os.symlink(tmp_path, tmp_path / 'round')
    assert not exceeds_limits(str(tmp_path), limits)
    assert exceeds_limits(str(tmp_path), limits._replace(disk_bytes=1 << 18))
    assert exceeds_limits(str(tmp_path), limits._replace(files=2))
