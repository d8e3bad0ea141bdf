"""Tests the rendezvous of processes at a port: complete, incomplete and contradictory groups."""

import concurrent.futures
import socket

import pytest

from maxlm.errors import InputError
from maxlm.runtime.rendezvous import RendezvousError, rendezvous
from tests.forking import free_port


def outcomes(members, seconds=30.0):
    """Returns the exceptions of `rendezvous` for each (number of processes, rank), and the coordinator's address."""
    coordinator = f'127.0.0.1:{free_port()}'
    with concurrent.futures.ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(rendezvous, coordinator, *member, seconds=seconds) for member in members]
        return [future.exception() for future in futures], coordinator


def test_complete_group_succeeds_and_frees_the_port():
    errors, coordinator = outcomes([(3, 0), (3, 2), (3, 1)])
    assert errors == [None] * 3
    socket.create_server(('127.0.0.1', int(coordinator.rpartition(':')[2]))).close()


def test_all_processes_report_missing_ranks():
    errors, coordinator = outcomes([(4, 0), (4, 2)], seconds=1.0)
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert f'2 of 4 processes connected to {coordinator} within 1 s; missing: 1, 3' in str(error)


def test_missing_coordinator_is_an_error():
    coordinator = f'127.0.0.1:{free_port()}'
    with pytest.raises(RendezvousError, match=f'process 0 did not respond at {coordinator}'):
        rendezvous(coordinator, 2, 1, seconds=0.5)


def test_unknown_host_is_bad_input():
    with pytest.raises(InputError, match=r'MAXLM_COORDINATOR=nowhere.invalid:80: the host cannot be found'):
        rendezvous('nowhere.invalid:80', 2, 1, seconds=0.5)


def test_port_in_use_is_bad_input():
    with socket.create_server(('127.0.0.1', 0)) as taken:
        coordinator = f'127.0.0.1:{taken.getsockname()[1]}'
        with pytest.raises(InputError, match=f'{coordinator}: process 0 cannot listen there'):
            rendezvous(coordinator, 2, 0, seconds=0.5)


@pytest.mark.parametrize(
    ('members', 'message'),
    [
        ([(2, 0), (3, 1)], 'MAXLM_NUM_PROCESSES=2 in process 0 but 3 in process 1'),
        ([(3, 0), (3, 1), (3, 1)], 'MAXLM_PROCESS_ID=1 is set in two processes'),
    ],
)
def test_contradictions_are_reported_to_all(members, message):
    errors, _ = outcomes(members)
    for error in errors:
        assert isinstance(error, InputError)
        assert message in str(error)


def test_other_clients_of_the_port_are_rejected():
    coordinator = f'127.0.0.1:{free_port()}'
    address = ('127.0.0.1', int(coordinator.rpartition(':')[2]))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous, coordinator, 2, 0, seconds=30.0)
        other = None
        while other is None:
            try:
                other = socket.create_connection(address)
            except ConnectionRefusedError:
                continue
        with other:
            other.sendall(b'GET / HTTP/1.1\n')
            second = pool.submit(rendezvous, coordinator, 2, 1, seconds=30.0)
            assert (first.exception(), second.exception()) == (None, None)
