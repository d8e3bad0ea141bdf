"""All checks in execution order: cheap ones first, those that start JAX in this process last."""

from __future__ import annotations

from collections.abc import Sequence

from maxlm.config.validation import nearest
from maxlm.diagnostics.checks.trial_run import TRIAL_SECONDS
from maxlm.diagnostics.jax_subprocess import START_SECONDS
from maxlm.diagnostics.runner import Check
from maxlm.errors import InputError

CHECKS: tuple[Check, ...] = (
    Check('python', 'packages:check_python', 10, 'the version of Python'),
    Check('packages', 'packages:check_packages', 60, 'what is installed, and the extras that are needed'),
    Check('driver', 'drivers:check_driver', 60, 'the driver of GPU or TPU, and what JAX needs for it'),
    Check('gpus', 'drivers:check_gpus', 60, 'memory errors, slowed clocks, and who else is on the GPUs'),
    Check('environment', 'environment:check_environment', 60, 'variables that make a run slow, small or wrong'),
    Check('ram', 'host:check_ram', 30, 'host memory that is free'),
    Check('shm', 'host:check_shm', 10, 'shared memory'),
    Check('files', 'host:check_files', 10, 'how many files may be open'),
    Check('disk', 'disk:check_disk', 120, 'room and writing speed of the workdir'),
    Check('clock', 'clock:check_clock', 60, 'whether the clock is right'),
    Check('bucket', 'bucket:check_bucket', 120, 'writing, listing, reading and deleting in the buckets of the run'),
    Check('data', 'data:check_data', 300, 'the data sets of the run'),
    Check('jax', 'jax_startup:check_jax', START_SECONDS + 20, 'whether JAX starts, and on what'),
    Check('cache', 'jax_startup:check_cache', START_SECONDS + 20, 'whether compiled programs are kept'),
    # Runs before JAX starts in this process, because JAX may lock the devices.
    Check('trial', 'trial_run:check_trial', TRIAL_SECONDS + 60, 'two steps of the run'),
    Check('processes', 'devices:check_processes', 400, 'the other processes, and their clocks', uses_devices=True),
    Check('devices', 'devices:check_devices', 300, 'number and kind of the devices, and the mesh', uses_devices=True),
    Check('memory', 'devices:check_memory', 120, 'memory of the devices', uses_devices=True),
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
                raise InputError(f'{option}={name}: there is no such check; {nearest(name, NAMES)}')
    chosen = [check for check in CHECKS if (check.name in only or not only) and check.name not in skip]
    if not chosen:
        raise InputError(f'--only={",".join(only)} --skip={",".join(skip)}: no check is left')
    return chosen
