"""Tests the device check with inconsistent and consistent devices."""

import types

import jax
import pytest

from maxlm.diagnostics.checks.devices import (
    check_devices,
    check_memory,
    check_processes,
    evaluate_clocks,
    evaluate_devices,
    evaluate_memory,
)
from maxlm.diagnostics.result import CheckStatus
from tests.diagnostics.machines import CPU, GIB, case_on
from tests.small import small_config


def devices(*kinds, processes=None):
    processes = processes or [0] * len(kinds)
    return [
        types.SimpleNamespace(device_kind=kind, process_index=process)
        for kind, process in zip(kinds, processes, strict=True)
    ]


def test_devices():
    case = case_on(CPU)
    assert evaluate_devices(devices('H100', 'H100'), case).message == '2 × H100'
    assert evaluate_devices(devices('H100', 'A100'), case).status is CheckStatus.FAILURE
    assert evaluate_devices(devices('H100', 'H100', processes=[0, 1]), case).message == '2 × H100 in 2 processes'
    missing = evaluate_devices(devices('H100', 'H100', 'H100', processes=[0, 0, 1]), case)
    assert missing.status is CheckStatus.FAILURE
    assert 'process 1 has 1 devices, other processes have up to 2' in missing.message


def test_the_mesh_of_the_run():
    case = case_on(CPU, config=small_config(8, mesh__data=4, mesh__fsdp=2))
    assert 'mesh data=4 fsdp=2' in check_devices(case).message
    found = evaluate_devices(devices(*['H100'] * 6), case)
    assert found.status is CheckStatus.FAILURE
    assert 'needs 8 devices, but 6 are available' in found.message


@pytest.mark.parametrize(
    ('limit', 'used', 'total', 'status'),
    [
        (73 * GIB, 0, 80 * GIB, 'ok'),
        (73 * GIB, 0, None, 'ok'),
        (20 * GIB, 0, 80 * GIB, 'warning'),
        (73 * GIB, 9 * GIB, 80 * GIB, 'warning'),
    ],
)
def test_memory(limit, used, total, status):
    assert evaluate_memory('device 0', limit, used, total).status == status


def test_memory_of_several(monkeypatch):
    def device(number, limit):
        stats = {'bytes_limit': limit, 'bytes_in_use': 0}
        return types.SimpleNamespace(id=number, device_kind='NVIDIA H100', memory_stats=lambda: stats)

    monkeypatch.setattr(jax, 'local_devices', lambda: [device(0, 73 * GIB), device(1, 73 * GIB)])
    assert check_memory(case_on(CPU)).message == 'each: JAX can use 73.0 GiB of 79.1 GiB'
    monkeypatch.setattr(jax, 'local_devices', lambda: [device(0, 73 * GIB), device(1, 9 * GIB)])
    found = check_memory(case_on(CPU))
    assert found.status is CheckStatus.WARNING
    assert 'device 1' in found.message
    assert 'device 0' not in found.message


def test_the_memory_of_a_cpu_is_not_reported():
    assert check_memory(case_on(CPU)).status is CheckStatus.SKIPPED


def test_clocks():
    assert evaluate_clocks([5.0, 5.01, 5.02]).message == '3 processes are connected, their clocks within 10 ms'
    found = evaluate_clocks([5.0, 65.0, 5.1])
    assert found.status is CheckStatus.WARNING
    assert 'the clock of process 1 is 59.9 s off' in found.message


def test_a_single_process():
    assert check_processes(case_on(CPU)).status is CheckStatus.SKIPPED


def test_missing_peer_processes(monkeypatch):
    from maxlm.runtime import initialize
    from maxlm.runtime.rendezvous import RendezvousError

    def join(environment):
        raise RendezvousError('a:1: process 1 did not come')

    monkeypatch.setattr(initialize, 'initialize', join)
    variables = {'MAXLM_COORDINATOR': 'a:1', 'MAXLM_NUM_PROCESSES': '2', 'MAXLM_PROCESS_ID': '0'}
    found = check_processes(case_on(CPU, environment=variables))
    assert (found.status, found.message) == (CheckStatus.FAILURE, 'a:1: process 1 did not come')
