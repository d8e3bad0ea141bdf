"""What a step is planned for: a target with what of it a program may have and reach; the devices here, or others."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import jax

from maxlm.config.schema import Config
from maxlm.hardware.chips import Chip, capability_of, find_chip, host_memory
from maxlm.parallel.layout import island_of
from maxlm.planning.estimate.cpu import calibrate_cpu
from maxlm.planning.estimate.roofline import Efficiency
from maxlm.planning.targets import Target

# Of a GPU's memory what JAX may take: launch/gpu_node.sh sets XLA_PYTHON_CLIENT_MEM_FRACTION to it.
GPU_SHARE = 0.92
# Of a TPU's what its compiler leaves to programs: it names 30.75 of a v4's 32 GiB.
TPU_SHARE = 0.96
# Of a machine's own memory, which others need too.
CPU_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices, and what a program gets of them."""

    target: Target
    # Bytes of a device that a program may have.
    available: int
    # Other than what is known of the chip: of a CPU, which has been measured.
    efficiency: Efficiency | None = None


def machine_of(target: Target, config: Config) -> Machine:
    """Of a target; a CPU is measured with products of the sizes of a resolved config."""
    if target.chip.platform == 'cpu':
        chip, efficiency = calibrate_cpu(config)
        # The cores of this machine, shared by as many devices as the target has.
        share = jax.local_device_count() / target.num_devices
        chip = dataclasses.replace(
            chip,
            tflops=chip.tflops * share,
            memory=host_memory() // target.num_devices,
            memory_bandwidth=chip.memory_bandwidth * share,
            link_bandwidth=chip.link_bandwidth * share,
        )
        return Machine(dataclasses.replace(target, chip=chip), usable_memory(chip), efficiency)
    return Machine(target, usable_memory(target.chip))


def present_machine(config: Config, *, measured: bool = True) -> Machine:
    """The devices of this run, for a resolved config.

    Of a kind that is not known, and of a CPU that is not measured, the times are nan.

    Args:
        config: of the run.
        measured: measures a CPU, unless its peak is configured. This allocates arrays of the config's sizes.
    """
    device, num_devices = jax.local_devices()[0], jax.device_count()
    islands = len({island_of(device) for device in jax.devices()})
    efficiency = None
    known = find_chip(device.device_kind)
    if known:
        chip = known
    elif device.platform == 'cpu' and measured and not config.metrics.peak_tflops:
        chip, efficiency = calibrate_cpu(config)
    else:
        chip, efficiency = _unknown(device), Efficiency(math.nan, math.nan, math.nan)
    target = Target(f'{chip.name}:{num_devices}', chip, num_devices, islands, (num_devices // islands, islands))
    told = (device.memory_stats() or {}).get('bytes_limit')
    return Machine(target, told or usable_memory(chip), efficiency)


def _unknown(device: Any) -> Chip:
    memory = host_memory() // jax.local_device_count() if device.platform == 'cpu' else sys.maxsize
    nan = math.nan
    chip = Chip(device.device_kind, device.platform, device.device_kind, nan, memory, nan, 1, nan, nan, nan)
    return dataclasses.replace(chip, capability=capability_of(device))


def usable_memory(chip: Chip) -> int:
    """Bytes of a device that a program may have."""
    return int(chip.memory * {'gpu': GPU_SHARE, 'tpu': TPU_SHARE, 'cpu': CPU_SHARE}[chip.platform])
