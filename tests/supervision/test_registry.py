"""Files of elastic runs: states of hosts, and generations on which all hosts agree."""

import os
from pathlib import Path

import pytest

from maxlm.errors import InputError
from maxlm.supervision.membership import NO_GENERATION, READY, Generation, HostState
from maxlm.supervision.registry import FOLDER, KEPT_GENERATIONS, Registry, quarantined_hosts


@pytest.fixture
def registry(tmp_path):
    registry = Registry(tmp_path)
    registry.open()
    assert os.listdir(tmp_path / FOLDER) == []
    return registry


def test_hosts_are_read_as_written(registry, tmp_path):
    hosts = [HostState(token, 'node', 'node:1', READY, 3) for token in 'ab']
    for host in hosts:
        registry.write(host._replace(beat=1))
        registry.write(host)
    assert sorted(registry.hosts()) == hosts
    # A damaged file is not a host.
    for text in ('', '{}', '[1]', '{"token": "c"}'):
        (tmp_path / FOLDER / 'host-c.json').write_text(text)
        assert sorted(registry.hosts()) == hosts


def test_only_one_proposal_of_a_number_succeeds(registry, tmp_path):
    assert registry.newest() == NO_GENERATION
    first, second = (Generation(1, (token, 'c'), f'{token}:1') for token in 'ab')
    assert registry.propose(first)
    assert not Registry(tmp_path).propose(second)
    assert registry.newest() == first
    assert registry.propose(second._replace(number=2))
    assert registry.newest().hosts == ('b', 'c')


def test_old_generations_are_deleted(registry, tmp_path):
    for number in range(1, KEPT_GENERATIONS + 4):
        assert registry.propose(Generation(number, ('a',), 'a:1'))
    assert len(os.listdir(tmp_path / FOLDER)) == KEPT_GENERATIONS
    assert registry.newest().number == KEPT_GENERATIONS + 3


def test_quarantine_ends_when_the_file_is_deleted(registry, tmp_path):
    assert quarantined_hosts(tmp_path) == []
    registry.quarantine('node-1', 'wrong values')
    # The name of a container may not be a file name.
    registry.quarantine('a/b', 'wrong values')
    assert quarantined_hosts(tmp_path) == ['a-b', 'node-1']
    assert registry.quarantine_file('node-2') is None
    assert registry.quarantine_file('a/b')
    path = registry.quarantine_file('node-1')
    assert path.read_text() == 'wrong values\n'
    path.unlink()
    assert registry.quarantine_file('node-1') is None
    # These files are neither hosts nor generations.
    assert (registry.hosts(), registry.newest()) == ([], NO_GENERATION)


def test_a_disk_without_hard_links_is_refused(tmp_path, monkeypatch):
    def fail(path, target):
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(Path, 'hardlink_to', fail)
    with pytest.raises(InputError, match=r'hard links cannot be created \(Operation not permitted\); use a --workdir'):
        Registry(tmp_path).open()
