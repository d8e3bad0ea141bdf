import contextlib
import os
import socket
import stat

import pytest

from maxlm.data.parts.scratch import scratch_directory
from maxlm.errors import InputError


def test_the_directory_is_private_and_is_removed(tmp_path):
    with scratch_directory(tmp_path / 'new') as directory:
        (directory / 'file').touch()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert os.listdir(tmp_path / 'new') == []


def test_directories_of_killed_processes_of_this_machine_are_removed(tmp_path):
    parent = tmp_path / 'tmp'
    abandoned, other = (parent / f'maxlm-prepare-{name}-x' for name in (socket.gethostname(), 'another.machine'))
    for path in (abandoned, other):
        path.mkdir()
        (path / 'file').touch()
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(scratch_directory(parent)) for _ in range(2))
        # The first process is still running.
        assert set(parent.iterdir()) == {first, second, other}


def test_an_unusable_parent_is_named(tmp_path):
    (tmp_path / 'file').touch()
    message = r'file.*: (Not a directory|File exists); set TMPDIR or --cache'
    with pytest.raises(InputError, match=message), scratch_directory(tmp_path / 'file'):
        pass
