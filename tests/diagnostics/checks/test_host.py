"""Tests the checks of memory, shared memory and open files with the figures of fake machines."""

import resource

import pytest

from maxlm.diagnostics.checks import host
from maxlm.diagnostics.checks.disk import checkpoint_bytes
from maxlm.diagnostics.checks.host import evaluate_files, evaluate_ram, evaluate_shm, read_cgroup
from maxlm.diagnostics.result import CheckStatus
from maxlm.planning.estimate.state_bytes import planned_state_bytes
from tests.diagnostics.machines import CPU, GIB, case_on
from tests.small import small_config


@pytest.mark.parametrize(
    ('available', 'bound', 'state', 'status'),
    [
        (60 * GIB, None, None, 'ok'),
        (60 * GIB, None, 59 * GIB, 'ok'),
        (60 * GIB, None, 61 * GIB, 'warning'),
        (5 * GIB, None, None, 'warning'),
        (GIB, None, None, 'failure'),
        # A container may have a lower limit than the machine.
        (60 * GIB, (8 * GIB, 7 * GIB), None, 'failure'),
        (60 * GIB, (8 * GIB, 3 * GIB), None, 'ok'),
        (60 * GIB, (2**63, 7 * GIB), None, 'ok'),
    ],
)
def test_ram(available, bound, state, status):
    assert evaluate_ram(64 * GIB, available, bound, state).status == status


def test_bounds_of_containers(tmp_path):
    assert read_cgroup(tmp_path) is None
    (tmp_path / 'memory.max').write_text('max\n')
    (tmp_path / 'memory.current').write_text('5\n')
    assert read_cgroup(tmp_path) is None
    (tmp_path / 'memory.max').write_text('17\n')
    assert read_cgroup(tmp_path) == (17, 5)


def test_bounds_of_older_containers(tmp_path):
    (tmp_path / 'memory').mkdir()
    (tmp_path / 'memory/memory.limit_in_bytes').write_text('9\n')
    (tmp_path / 'memory/memory.usage_in_bytes').write_text('4\n')
    assert read_cgroup(tmp_path) == (9, 4)


def test_shm():
    assert evaluate_shm(2**26, 2**26).status is CheckStatus.WARNING
    assert evaluate_shm(8 * GIB, 7 * GIB).status is CheckStatus.OK


@pytest.mark.parametrize(
    ('soft', 'status'), [(resource.RLIM_INFINITY, 'ok'), (65536, 'ok'), (1024, 'warning'), (256, 'failure')]
)
def test_files(soft, status):
    found = evaluate_files(soft, 4096)
    assert found.status == status
    assert found.remedy == ('' if status == 'ok' else 'ulimit -n 4096')


def test_this_machine(monkeypatch, tmp_path):
    case = case_on(CPU)
    assert host.check_ram(case).message
    assert host.check_files(case).message
    monkeypatch.setattr(host, 'SHM', tmp_path)
    assert host.check_shm(case).status in (CheckStatus.OK, CheckStatus.WARNING)
    monkeypatch.setattr(host, 'SHM', tmp_path / 'none')
    assert host.check_shm(case).status is CheckStatus.SKIPPED


def test_the_size_of_a_checkpoint_does_not_depend_on_the_mesh():
    one, eight = small_config(), small_config(8)
    assert checkpoint_bytes(None) is None
    assert checkpoint_bytes(one) == checkpoint_bytes(eight) == sum(planned_state_bytes(one))
    assert checkpoint_bytes(small_config(model__dim=64)) > checkpoint_bytes(one)
