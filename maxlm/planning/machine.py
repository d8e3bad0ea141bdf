"""The devices that a step is planned for, and their usable memory and speed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from maxlm.config.resolve import resolve
from maxlm.config.schema import AUTO, Config
from maxlm.hardware.chips import Chip, capability_of, find_chip, host_memory
from maxlm.parallel.layout import island_of
from maxlm.planning.estimate.cpu import Cpu, calibrate_cpu, num_cores
from maxlm.planning.estimate.roofline import Efficiency
from maxlm.planning.targets import Target
from maxlm.runtime.compilation_cache import CompilationCache
from maxlm.storage.json_text import parse_json

# Fraction of a GPU's memory that JAX may use: launch/gpu_node.sh sets XLA_PYTHON_CLIENT_MEM_FRACTION to it.
GPU_FRACTION = 0.92
# Fraction of a TPU's memory that its compiler makes available: 30.75 of a v4's 32 GiB.
TPU_FRACTION = 0.96
# Fraction of host memory that a program may use; other processes need memory too.
CPU_FRACTION = 0.8
# Version of stored calibrations, and the seconds after which a CPU is calibrated again.
CALIBRATION_VERSION = 1
CALIBRATION_AGE = 24 * 3600


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices, and their resources that a program can use.

    Attributes:
        target: the devices.
        available: bytes of a device that a program may use.
        efficiency: measured constants, for a CPU. None: the fitted constants of the chip.
    """

    target: Target
    available: int
    efficiency: Efficiency | None = None


def local_resolver(*, vocab_size: int, windows: int | None) -> partial[Config]:
    """Returns `resolve` for the devices of this process, and the processes that it trains with.

    Args:
        vocab_size: size of the vocabulary of the data.
        windows: number of sequences of an epoch; None if the data has none.
    """
    return partial(
        resolve,
        platform=jax.default_backend(),
        num_devices=jax.device_count(),
        vocab_size=vocab_size,
        windows=windows,
        capability=capability_of(jax.local_devices()[0]),
    )


def sized_config(config: Config, resolver: Callable[[Config], Config]) -> Config:
    """Returns a config resolved for these devices, with a per-device batch size of 1 if it is `auto`."""
    if config.train.per_device_batch_size == AUTO:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, per_device_batch_size=1))
    return resolver(config)


def machine_of(target: Target, config: Config) -> Machine:
    """Returns the machine of a target. A CPU is measured with matrix products of a resolved config's sizes."""
    if target.chip.platform == 'cpu':
        chip, efficiency = calibrate_cpu(config)
        # The virtual devices of the target share the cores of this machine.
        fraction = jax.local_device_count() / target.num_devices
        chip = dataclasses.replace(
            chip,
            tflops=chip.tflops * fraction,
            memory=host_memory() // target.num_devices,
            memory_bandwidth=chip.memory_bandwidth * fraction,
            link_bandwidth=chip.link_bandwidth * fraction,
        )
        return Machine(dataclasses.replace(target, chip=chip), usable_memory(chip), efficiency)
    return Machine(target, usable_memory(target.chip))


def present_machine(config: Config, *, measured: bool = True, cache: CompilationCache | None = None) -> Machine:
    """Returns the present devices, for a resolved config.

    The times are nan for an unknown kind of device, and for a CPU that is not measured.

    Args:
        config: config of the run.
        measured: measure a CPU, unless its peak is configured. This allocates arrays of the config's sizes.
        cache: stores the measurement for a day.
    """
    device, num_devices = jax.local_devices()[0], jax.device_count()
    islands = len({island_of(device) for device in jax.devices()})
    efficiency = None
    known = find_chip(device.device_kind)
    if known:
        chip = known
    elif device.platform == 'cpu' and measured and not config.metrics.peak_tflops:
        chip, efficiency = calibrate_cpu(config) if cache is None else _stored_calibration(config, cache)
    else:
        chip, efficiency = _unknown(device), Efficiency(math.nan, math.nan, math.nan)
    target = Target(f'{chip.name}:{num_devices}', chip, num_devices, islands, (num_devices // islands, islands))
    limit = (device.memory_stats() or {}).get('bytes_limit')
    return Machine(target, limit or usable_memory(chip), efficiency)


def _stored_calibration(config: Config, cache: CompilationCache) -> Cpu:
    """Returns the calibration of this CPU, measured at most `CALIBRATION_AGE` ago."""
    parts = (CALIBRATION_VERSION, jax.__version__, num_cores(), jax.local_device_count(), config)
    key = f'calibration-{hashlib.sha256(repr(parts).encode()).hexdigest()}'
    if stored := cache.get(key):
        entry = parse_json(stored)
        if 0 <= time.time() - entry['time'] < CALIBRATION_AGE:
            return Cpu(Chip(**entry['chip']), Efficiency(**entry['efficiency']))
    cpu = calibrate_cpu(config)
    entry = {'time': time.time(), 'chip': dataclasses.asdict(cpu.chip), 'efficiency': cpu.efficiency._asdict()}
    cache.put(key, json.dumps(entry).encode())
    return cpu


def _unknown(device: Any) -> Chip:
    memory = host_memory() // jax.local_device_count() if device.platform == 'cpu' else sys.maxsize
    nan = math.nan
    chip = Chip(device.device_kind, device.platform, device.device_kind, nan, memory, nan, 1, nan, nan, nan)
    return dataclasses.replace(chip, capability=capability_of(device), float32_tflops=nan)


def usable_memory(chip: Chip) -> int:
    """Returns the bytes of a device that a program may use."""
    return int(chip.memory * {'gpu': GPU_FRACTION, 'tpu': TPU_FRACTION, 'cpu': CPU_FRACTION}[chip.platform])
