"""Computes the numbers of hosts with which a config can train."""

from __future__ import annotations

from collections.abc import Sequence

from maxlm.config.config_files import split_overrides
from maxlm.config.loading import load
from maxlm.config.resolve import check_num_devices
from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.supervision.restarts import find_option

# Axes that split the batch. One of them is -1 in an elastic run, so that it can use fewer devices.
ELASTIC_AXES = ('fsdp', 'data', 'replica')


def load_config(command: Sequence[str]) -> Config:
    """Loads the config that a command names with --config and --config.section.key=value.

    Raises:
        InputError: the command names no config, or the config is invalid.
    """
    overrides, rest = split_overrides(command)
    spec = find_option(rest, '--config')
    if not spec:
        raise InputError('--min-hosts: the command has no --config; give it the --config of the run')
    return load(spec, overrides)


def host_counts(config: Config, *, min_hosts: int, max_hosts: int, devices_per_host: int) -> list[int]:
    """Returns the numbers of hosts from `min_hosts` to `max_hosts` with which a config can train, ascending.

    Raises:
        InputError: no data-parallel axis of the mesh is -1, or the config cannot train on the smallest or the
            largest number of hosts.
    """
    if all(getattr(config.mesh, axis) != -1 for axis in ELASTIC_AXES):
        sizes = ' '.join(f'{axis}={size}' for axis, size in config.mesh.sizes.items() if size != 1)
        raise InputError(
            f'--min-hosts={min_hosts}: mesh {sizes or "with size 1 on every axis"} cannot use fewer hosts; set one of '
            f'{", ".join(f"mesh.{axis}" for axis in ELASTIC_AXES)} to -1'
        )
    errors = {}
    for count in range(min_hosts, max_hosts + 1):
        try:
            check_num_devices(config, count * devices_per_host)
            # fsdp splits parameters. What divides them stays unknown without the model, but divisors of it do too.
            if config.mesh.fsdp == -1 and max_hosts % count:
                raise InputError(f'with mesh.fsdp=-1, the number of hosts must divide {max_hosts}')
        except InputError as error:
            errors[count] = error
    counts = [count for count in range(min_hosts, max_hosts + 1) if count not in errors]
    for option, count in (('--hosts', max_hosts), ('--min-hosts', min_hosts)):
        if count in errors:
            works = f'values from {min_hosts} to {max_hosts} that work: {", ".join(map(str, counts)) or "none"}'
            raise InputError(f'{option}={count} with {devices_per_host} devices per host: {errors[count]}; {works}')
    return counts
