"""All checks in execution order: cheap ones first, those that start JAX in this process last."""

from __future__ import annotations

from collections.abc import Sequence

from maxlm.diagnostics.checks.trial_run import TRIAL_SECONDS
from maxlm.diagnostics.jax_subprocess import START_SECONDS
from maxlm.diagnostics.runner import Check
from maxlm.errors import InputError, nearest

CHECKS: tuple[Check, ...] = (
    Check('python', 'packages:check_python', 10, 'Python version'),
    Check('packages', 'packages:check_packages', 60, 'required packages and extras'),
    Check('driver', 'drivers:check_driver', 60, 'GPU or TPU driver, and the JAX plugin that it needs'),
    Check('gpus', 'drivers:check_gpus', 60, 'memory errors, throttling and other processes on the GPUs'),
    Check('environment', 'environment:check_environment', 60, 'variables that break a run or slow it down'),
    Check('ram', 'host:check_ram', 30, 'free host memory'),
    Check('shm', 'host:check_shm', 10, 'shared memory'),
    Check('files', 'host:check_files', 10, 'limit of open files'),
    Check('disk', 'disk:check_disk', 120, 'free space and write speed of the workdir'),
    Check('clock', 'clock:check_clock', 60, 'clock synchronization'),
    Check('bucket', 'bucket:check_bucket', 120, 'writing, listing, reading and deleting in the buckets of the run'),
    Check('data', 'data:check_data', 300, 'data sets of the run'),
    Check('jax', 'jax_startup:check_jax', START_SECONDS + 20, 'JAX startup and its platform'),
    Check('cache', 'jax_startup:check_cache', START_SECONDS + 20, 'compilation cache'),
    # Runs before JAX starts in this process, because JAX may lock the devices.
    Check('trial', 'trial_run:check_trial', TRIAL_SECONDS + 60, 'two training steps of the run'),
    Check('resume', 'resume:check_resume', 2 * TRIAL_SECONDS + 60, 'a restart from a checkpoint, with --try-resume'),
    Check(
        'processes', 'devices:check_processes', 400, 'connection and clocks of the other processes', uses_devices=True
    ),
    Check('devices', 'devices:check_devices', 300, 'number and kind of the devices, and the mesh', uses_devices=True),
    Check('memory', 'devices:check_memory', 120, 'memory of the devices', uses_devices=True),
    Check('kernels', 'kernels:check_kernels', 300, 'results of the kernels of the run', uses_devices=True),
    Check('matmul', 'bandwidth:check_matmul', 300, 'speed of each device', uses_devices=True),
    Check('links', 'bandwidth:check_links', 300, 'speed of the links between devices', uses_devices=True),
)
NAMES = tuple(check.name for check in CHECKS)


def choose(only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """Returns the checks named in `only`, or all if it is empty, without those in `skip`.

    Raises:
        InputError: a name is unknown, or no check is left.
    """
    for option, names in (('--only', only), ('--skip', skip)):
        for name in names:
            if name not in NAMES:
                raise InputError(f'{option}={name}: unknown check; {nearest(name, NAMES)}')
    chosen = [check for check in CHECKS if (check.name in only or not only) and check.name not in skip]
    if not chosen:
        raise InputError(
            f'--only={",".join(only)} --skip={",".join(skip)}: no check is left; remove a name from --skip'
        )
    return chosen
