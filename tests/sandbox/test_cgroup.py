"""Tests control groups on ordinary files, since the test machine may not delegate cgroups."""

import os

import pytest

from maxlm.sandbox.cgroup import Group, find_parent
from maxlm.sandbox.limits import SandboxLimits


def fake_groups(folder, controllers='cpu memory pids'):
    """Creates the files of a kernel control group. Here they only store what is written."""
    own = folder / 'own'
    own.write_text('1:name=systemd:/x\n0::/slice/run\n')
    parent = folder / 'slice' / 'run'
    parent.mkdir(parents=True)
    (parent / 'cgroup.subtree_control').write_text(controllers)
    return own, parent


def test_a_group_that_can_be_divided_is_found(tmp_path):
    own, parent = fake_groups(tmp_path)
    assert find_parent(tmp_path, own) == parent
    (parent / 'cgroup.subtree_control').write_text('cpu pids')
    with pytest.raises(OSError, match='does not delegate memory'):
        find_parent(tmp_path, own)
    own.write_text('4:memory:/x\n')
    with pytest.raises(OSError, match='not in a cgroup v2 group'):
        find_parent(tmp_path, own)


def test_a_group_is_limited_entered_and_removed(tmp_path):
    _, parent = fake_groups(tmp_path)
    descriptor = os.open(parent, os.O_RDONLY)
    group = Group(descriptor, 'one')
    files = (
        'memory.max',
        'memory.swap.max',
        'memory.oom.group',
        'pids.max',
        'cgroup.procs',
        'cgroup.kill',
        'memory.events',
    )
    for name in files:
        (parent / 'one' / name).write_text('')
    group.limit(SandboxLimits(memory_bytes=100, disk_bytes=20, processes=7))
    procs_file = group.open_procs()
    os.write(procs_file, b'0')
    os.close(procs_file)
    (parent / 'one' / 'memory.events').write_text('low 0\noom_kill 0\n')
    assert not group.out_of_memory()
    (parent / 'one' / 'memory.events').write_text('low 0\noom_kill 2\n')
    assert group.out_of_memory()
    group.kill()
    found = {name: (parent / 'one' / name).read_text() for name in files[:-1]}
    values = ('120', '0', '1', '8', '0', '1')
    assert found == dict(zip(files, values, strict=False))
    # The kernel removes a group's directory with its files; the fake directory must be emptied first.
    group.remove()
    assert (parent / 'one').exists()
    for name in files:
        (parent / 'one' / name).unlink()
    group.remove()
    assert not (parent / 'one').exists()
    os.close(descriptor)
