"""Tests the detection of a process's rank from the environment, and invalid environments."""

import pytest

from maxlm.errors import InputError
from maxlm.runtime.initialize import ClusterEnv, ProcessEnv, detect_cluster, detect_process_env, initialize
from tests.messages import input_error


def environment(coordinator='localhost:1234', num_processes='4', process_id='3', devices=''):
    values = {
        'COORDINATOR': coordinator,
        'NUM_PROCESSES': num_processes,
        'PROCESS_ID': process_id,
        'LOCAL_DEVICES': devices,
    }
    return {f'MAXLM_{name}': value for name, value in values.items() if value}


def test_process_environment_is_parsed():
    assert detect_process_env({}) is None
    assert detect_process_env(environment()) == ProcessEnv('localhost:1234', 4, 3, None)
    assert detect_process_env(environment('[::1]:80', devices='2,3')) == ProcessEnv('[::1]:80', 4, 3, [2, 3])


@pytest.mark.parametrize(
    ('variables', 'message'),
    [
        (environment(coordinator=''), 'without MAXLM_COORDINATOR;'),
        (environment(num_processes='', process_id=''), 'without MAXLM_NUM_PROCESSES, MAXLM_PROCESS_ID;'),
        ({'MAXLM_LOCAL_DEVICES': '0'}, 'MAXLM_LOCAL_DEVICES set without'),
        (environment(process_id='4'), 'MAXLM_PROCESS_ID=4: must be below MAXLM_NUM_PROCESSES=4'),
        (environment(process_id='-1'), 'MAXLM_PROCESS_ID=-1'),
        (environment(num_processes='0'), 'MAXLM_NUM_PROCESSES=0'),
        (environment(num_processes='four'), 'MAXLM_NUM_PROCESSES=four'),
        (environment(devices='0,,1'), 'MAXLM_LOCAL_DEVICES='),
        (environment(coordinator='localhost'), 'MAXLM_COORDINATOR=localhost: must be HOST:PORT'),
        (environment(coordinator='localhost:0'), 'MAXLM_COORDINATOR=localhost:0'),
        (environment(coordinator=':80'), 'MAXLM_COORDINATOR=:80'),
    ],
)
def test_invalid_variables_are_reported(variables, message):
    with input_error(message):
        detect_process_env(variables)


def test_single_process_opens_no_port(monkeypatch):
    def refuse(**_):
        raise AssertionError

    monkeypatch.setattr('jax.distributed.initialize', refuse)
    initialize({})
    initialize(environment(num_processes='1', process_id='0'))
    # A shell in a Slurm allocation is not a job step.
    initialize({'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '4'})
    with pytest.raises(AssertionError):
        initialize(
            {'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '4', 'SLURM_STEP_NODELIST': 'a[1-4]', 'SLURM_STEP_NUM_NODES': '4'}
        )


def test_detection_of_clusters():
    slurm = {'SLURM_STEP_NODELIST': 'a[1-4]', 'SLURM_NTASKS': '4', 'SLURM_STEP_NUM_NODES': '4'}
    assert detect_cluster(slurm) == ClusterEnv('the Slurm step', 1)
    assert detect_cluster({**slurm, 'SLURM_NTASKS': '32'}) == ClusterEnv('the Slurm step', 8)
    assert detect_cluster({**slurm, 'SLURM_NTASKS': '1'}) is None
    mpi = {'OMPI_COMM_WORLD_SIZE': '8', 'OMPI_COMM_WORLD_LOCAL_SIZE': '8', 'OMPI_MCA_orte_hnp_uri': '1.0;tcp://a:1'}
    assert detect_cluster(mpi) == ClusterEnv('the Open MPI job', 8)
    del mpi['OMPI_MCA_orte_hnp_uri']
    with pytest.raises(InputError, match='MAXLM_COORDINATOR'):
        detect_cluster(mpi)


@pytest.mark.parametrize(('tasks', 'devices'), [('4', []), ('32', None)])
def test_single_task_on_a_node_gets_all_devices(monkeypatch, tasks, devices):
    seen = {}
    monkeypatch.setattr('jax.distributed.initialize', lambda **arguments: seen.update(arguments))
    slurm = {'SLURM_STEP_NODELIST': 'a[1-4]', 'SLURM_NTASKS': tasks, 'SLURM_STEP_NUM_NODES': '4'}
    initialize(slurm)
    assert seen['local_device_ids'] == devices
