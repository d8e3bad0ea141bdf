"""Files of elastic runs: states of hosts, and generations on which all hosts agree."""

import os
from pathlib import Path

import pytest

from maxlm.errors import InputError
from maxlm.supervision.elastic_hosts import FOLDER, KEPT_GENERATIONS, ElasticHosts, quarantined_hosts
from maxlm.supervision.membership import NO_GENERATION, READY, Generation, HostState


@pytest.fixture
def elastic_hosts(tmp_path):
    elastic_hosts = ElasticHosts(tmp_path)
    elastic_hosts.open()
    assert os.listdir(tmp_path / FOLDER) == []
    return elastic_hosts


def test_hosts_are_read_as_written(elastic_hosts, tmp_path):
    hosts = [HostState(token, 'node', 'node:1', READY, 3) for token in 'ab']
    for host in hosts:
        elastic_hosts.write(host._replace(beat=1))
        elastic_hosts.write(host)
    assert sorted(elastic_hosts.hosts()) == hosts
    # A damaged file is not a host.
    for text in ('', '{}', '[1]', '{"token": "c"}'):
        (tmp_path / FOLDER / 'host-c.json').write_text(text)
        assert sorted(elastic_hosts.hosts()) == hosts


def test_only_one_proposal_of_a_number_succeeds(elastic_hosts, tmp_path):
    assert elastic_hosts.newest() == NO_GENERATION
    first, second = (Generation(1, (token, 'c'), f'{token}:1') for token in 'ab')
    assert elastic_hosts.propose(first)
    assert not ElasticHosts(tmp_path).propose(second)
    assert elastic_hosts.newest() == first
    assert elastic_hosts.propose(second._replace(number=2))
    assert elastic_hosts.newest().hosts == ('b', 'c')


def test_old_generations_are_deleted(elastic_hosts, tmp_path):
    for number in range(1, KEPT_GENERATIONS + 4):
        assert elastic_hosts.propose(Generation(number, ('a',), 'a:1'))
    assert len(os.listdir(tmp_path / FOLDER)) == KEPT_GENERATIONS
    assert elastic_hosts.newest().number == KEPT_GENERATIONS + 3


def test_quarantine_ends_when_the_file_is_deleted(elastic_hosts, tmp_path):
    assert quarantined_hosts(tmp_path) == []
    elastic_hosts.quarantine('node-1', 'wrong values')
    # The name of a container may not be a file name.
    elastic_hosts.quarantine('a/b', 'wrong values')
    assert quarantined_hosts(tmp_path) == ['a-b', 'node-1']
    assert elastic_hosts.quarantine_file('node-2') is None
    assert elastic_hosts.quarantine_file('a/b')
    path = elastic_hosts.quarantine_file('node-1')
    assert path.read_text() == 'wrong values\n'
    path.unlink()
    assert elastic_hosts.quarantine_file('node-1') is None
    # These files are neither hosts nor generations.
    assert (elastic_hosts.hosts(), elastic_hosts.newest()) == ([], NO_GENERATION)


def test_a_disk_without_hard_links_is_refused(tmp_path, monkeypatch):
    def fail(path, target):
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(Path, 'hardlink_to', fail)
    with pytest.raises(InputError, match=r'hard links cannot be created \(Operation not permitted\); use a --workdir'):
        ElasticHosts(tmp_path).open()
