"""Initializes the distributed processes of a run, before any process uses a device.

The environment defines the processes: MAXLM_COORDINATOR=HOST:PORT (of process 0), MAXLM_NUM_PROCESSES,
MAXLM_PROCESS_ID and optionally MAXLM_LOCAL_DEVICES=0,1,…. Otherwise JAX detects Slurm, Open MPI or a TPU pod.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import threading
from collections.abc import Mapping
from typing import NamedTuple

import jax

from maxlm.errors import InputError
from maxlm.runtime.rendezvous import COORDINATOR, NUM_PROCESSES, PROCESS_ID, RendezvousError, rendezvous

LOCAL_DEVICES = 'MAXLM_LOCAL_DEVICES'

# Timeout for processes that the cluster starts later.
JOIN_SECONDS = 300
# JAX aborts a process with a stack trace if a process misses its heartbeat. `Heartbeats` ends it earlier.
HEARTBEAT_SECONDS = 30
# All processes reach the end of a run together. A lost process must not delay the other processes.
SHUTDOWN_SECONDS = 30


class ProcessEnv(NamedTuple):
    """Environment of one process of a run.

    Attributes:
        coordinator: HOST:PORT of process 0.
        num_processes: number of processes.
        process_id: index of this process.
        local_devices: indices of its devices; None = all devices of the machine.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: list[int] | None


def initialize(environment: Mapping[str, str] = os.environ) -> None:
    """Initializes the distributed processes that the environment defines. A single process opens no port.

    Raises:
        InputError: the variables are inconsistent, in this process or among the processes.
        RendezvousError: not all processes arrived in time.
    """
    process_env = detect_process_env(environment)
    if process_env is not None and process_env.num_processes > 1:
        rendezvous(process_env.coordinator, process_env.num_processes, process_env.process_id, seconds=JOIN_SECONDS)
        _initialize(
            process_env.coordinator,
            coordinator_address=process_env.coordinator,
            num_processes=process_env.num_processes,
            process_id=process_env.process_id,
            # An empty list means all devices. With None, JAX looks for a cluster that assigns devices.
            local_device_ids=process_env.local_devices or [],
        )
    elif process_env is not None:
        if process_env.local_devices:
            jax.config.update('jax_cuda_visible_devices', ','.join(map(str, process_env.local_devices)))
    elif (cluster := detect_cluster(environment)) is not None:
        # JAX would give each task one device, which is wrong for a task that has a node for itself.
        devices: list[int] | None = [] if cluster.num_local_tasks == 1 else None
        _initialize(f'process 0 of {cluster.cluster}', local_device_ids=devices)
    elif _on_tpu(environment):
        try:
            _initialize('worker 0 of the TPU pod')
        except ValueError:
            # A TPU machine outside a pod has no coordinator.
            return


class ClusterEnv(NamedTuple):
    """Cluster job whose tasks form a run.

    Attributes:
        cluster: name of the job in messages.
        num_local_tasks: number of tasks on this node.
    """

    cluster: str
    num_local_tasks: int


def detect_cluster(environment: Mapping[str, str]) -> ClusterEnv | None:
    """Detects the tasks of a Slurm step or an Open MPI job. Returns None if there is at most one task.

    Raises:
        InputError: the version of Open MPI does not support JAX's detection.
    """
    if int(environment.get('OMPI_COMM_WORLD_SIZE', 1)) > 1:
        if 'OMPI_MCA_orte_hnp_uri' not in environment:
            raise InputError(
                f'this version of Open MPI does not report the address of process 0; set {COORDINATOR}, '
                f'{NUM_PROCESSES} and {PROCESS_ID}'
            )
        return ClusterEnv('the Open MPI job', int(environment.get('OMPI_COMM_WORLD_LOCAL_SIZE', 1)))
    # A batch script or a shell is not a Slurm step and runs one process.
    if 'SLURM_STEP_NODELIST' in environment and int(environment.get('SLURM_NTASKS', 1)) > 1:
        nodes = int(environment.get('SLURM_STEP_NUM_NODES', 1))
        return ClusterEnv('the Slurm step', -(-int(environment['SLURM_NTASKS']) // nodes))
    return None


def detect_process_env(environment: Mapping[str, str]) -> ProcessEnv | None:
    """Reads the MAXLM_ variables. Returns None if none of them is set.

    Raises:
        InputError: a variable is missing or not valid.
    """
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    values = {name: environment.get(name, '') for name in names}
    missing = [name for name, value in values.items() if not value]
    if missing:
        if len(missing) < len(names) or environment.get(LOCAL_DEVICES):
            present = [name for name in (*names, LOCAL_DEVICES) if environment.get(name)]
            raise InputError(
                f'{", ".join(present)} set without {", ".join(missing)}; set all of {", ".join(names)}, or none of them'
            )
        return None
    num_processes = _natural(NUM_PROCESSES, values[NUM_PROCESSES])
    process_id = _natural(PROCESS_ID, values[PROCESS_ID])
    if not num_processes:
        raise InputError(f'{NUM_PROCESSES}=0: must be at least 1')
    if process_id >= num_processes:
        raise InputError(f'{PROCESS_ID}={process_id}: must be below {NUM_PROCESSES}={num_processes}; IDs start at 0')
    _check_address(values[COORDINATOR])
    listed = environment.get(LOCAL_DEVICES)
    devices = [_natural(LOCAL_DEVICES, number) for number in listed.split(',')] if listed else None
    return ProcessEnv(values[COORDINATOR], num_processes, process_id, devices)


def _natural(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise InputError(
            f'{name}={value}: must be a non-negative integer, or a comma-separated list of them in {LOCAL_DEVICES}'
        )
    return int(value)


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(':')
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f'{COORDINATOR}={address}: must be HOST:PORT of process 0, with a port from 1 to 65535')


def _on_tpu(environment: Mapping[str, str]) -> bool:
    """Returns True if JAX will run on the TPU of this machine. Querying JAX would acquire the TPU."""
    platforms = environment.get('JAX_PLATFORMS', '')
    may_use_tpu = not platforms or 'tpu' in platforms
    chips = glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*')
    return may_use_tpu and bool(chips) and importlib.util.find_spec('libtpu') is not None


def _initialize(coordinator: str, **arguments: object) -> None:
    """Calls `jax.distributed.initialize`. After a timeout it exits with an error message instead of JAX's abort."""

    def abort() -> None:
        message = f'{coordinator} and the other processes did not all connect within {JOIN_SECONDS} s; restart the run'
        RendezvousError(message).exit_process()

    timer = threading.Timer(JOIN_SECONDS, abort)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            **arguments,  # type: ignore[arg-type]
            initialization_timeout=JOIN_SECONDS + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RendezvousError(f'{coordinator}: the processes could not connect ({reason}); restart the run') from error
    finally:
        timer.cancel()
