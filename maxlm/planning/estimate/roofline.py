"""Estimates the time of a step from its work and the device's resources.

Williams et al. 2009, "Roofline": the time of a piece of work is that of its scarcest resource. A training step is a
sequence of products, bound by arithmetic, and elementwise kernels, bound by memory; their times add up. Communication
can overlap both. Times of collectives follow Austin et al. 2025, "How to Scale Your Model", chapters 3 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from maxlm.config.schema import MESH_AXES, Config
from maxlm.errors import InputError
from maxlm.hardware.chips import Chip
from maxlm.parallel.layout import split_across_islands
from maxlm.planning.estimate.transfers import Transfer
from maxlm.planning.estimate.work import Work
from maxlm.training.flops import step_flops

# Minimum number of devices of a slice whose torus dimensions are closed to rings. Smaller slices lack half of the
# links.
CLOSED_TORUS = {2: 256, 3: 64}


class Efficiency(NamedTuple):
    """Fractions of datasheet figures that a training step reaches, fitted by `benchmarks.calibrate`.

    Attributes:
        products: fraction of the peak in matrix products.
        attention: fraction of the peak in a fused attention kernel.
        memory: fraction of the memory bandwidth.
        links: fraction of the bandwidth of links within an island.
        network: fraction of the bandwidth of the network.
        overlap: fraction of concurrent communication that is hidden. The rest is exposed: first and last layers have no
            computation to overlap, and both compete for units and bandwidth.
        latency: seconds before a collective sends data.
        per_step: fixed seconds per step.
    """

    products: float
    attention: float
    memory: float
    links: float = 0.8
    network: float = 0.8
    overlap: float = 0.8
    latency: float = 20e-6
    per_step: float = 1e-3


class StepTime(NamedTuple):
    """Seconds of one step on each device.

    Attributes:
        compute: matrix products, including attention.
        memory: elementwise kernels.
        communication: collectives.
        hidden: the part of `communication` that overlaps `compute` and `memory`.
        host: transfers to and from host memory that are not hidden.
        idle: pipeline stages waiting for each other.
        fixed: fixed costs.
    """

    compute: float
    memory: float
    communication: float
    hidden: float
    host: float
    idle: float
    fixed: float

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.communication - self.hidden + self.host + self.idle + self.fixed

    @property
    def bound(self) -> str:
        """Returns the largest component of the step: compute | memory | communication | host | idle."""
        components = {
            'compute': self.compute,
            'memory': self.memory,
            'communication': self.communication - self.hidden,
            'host': self.host,
            'idle': self.idle,
        }
        return max(components, key=lambda name: components[name])


class Mfu(NamedTuple):
    """Model FLOPs utilization by both conventions of `step_flops`."""

    causal: float
    full: float


class TransferTime(NamedTuple):
    """Seconds of all executions of a transfer.

    Attributes:
        transfer: the transfer.
        seconds: seconds of all executions.
        can_hide: whether the device can compute at the same time.
    """

    transfer: Transfer
    seconds: float
    can_hide: bool


# Chips that use the constants of a similar chip, because too few figures are published for them.
LIKE = {
    **dict.fromkeys(('h100-pcie', 'h100-nvl', 'gh200', 'h200', 'b200', 'l40s', 'l40', 'l4', 'rtx4090'), 'h100'),
    **dict.fromkeys(('a100-40', 'a10g', 'rtx3090', 'rtx3080', 'v100'), 'a100'),
    **dict.fromkeys(('v2', 'v3', 'v4lite'), 'v4'),
    **dict.fromkeys(('v6e', 'v7x'), 'v5p'),
}
# Fitted to published figures; tests/benchmarks/test_calibrate.py repeats the fit.
_GPU = Efficiency(products=0.0, attention=0.375, memory=0.85, links=0.55, network=0.55, overlap=0.0, latency=20e-6)
_TPU = Efficiency(products=0.0, attention=0.6, memory=0.7, links=0.8, network=0.8, overlap=0.449, latency=5e-6)
EFFICIENCIES: dict[str, Efficiency] = {
    'a100': _GPU._replace(products=0.833),
    'h100': _GPU._replace(products=0.656),
    'v4': _TPU._replace(products=0.749),
    'v5e': _TPU._replace(products=0.912),
    'v5p': _TPU._replace(products=0.875),
}


def efficiency_of(chip: Chip) -> Efficiency:
    """Returns the fitted constants of a chip.

    Raises:
        InputError: there are none, e.g. for a CPU, which `maxlm.planning.estimate.cpu` measures.
    """
    name = LIKE.get(chip.name, chip.name)
    if name not in EFFICIENCIES:
        raise InputError(
            f'{chip.name}: no efficiency is known for this chip; use one of {", ".join([*EFFICIENCIES, *LIKE])}'
        )
    return EFFICIENCIES[name]


def step_time(
    work: Work,
    chip: Chip,
    *,
    num_devices: int,
    num_islands: int,
    mesh_sizes: Mapping[str, int],
    dtype: str,
    efficiency: Efficiency | None = None,
) -> StepTime:
    """Returns the time of a step.

    Args:
        work: work of each device.
        chip: kind of device.
        num_devices: number of devices in the run.
        num_islands: nodes of GPUs or slices of TPUs, with fast links within.
        mesh_sizes: `mesh.sizes` of the resolved config.
        dtype: dtype of the products (model.dtype).
        efficiency: constants that replace the chip's fitted ones.

    Raises:
        InputError: the mesh cannot be split over `num_islands` islands.
    """
    efficiency = efficiency or efficiency_of(chip)
    peak = chip.peak(dtype).tflops * 1e12
    # Products of other dtypes are assumed to reach the same fraction of their own peak.
    products = (work.flops - work.fp8_flops) / peak + work.fp8_flops / (chip.fp8_tflops * 1e12)
    compute = products / efficiency.products + work.attention_flops / (peak * efficiency.attention)
    memory = work.memory_bytes / (chip.memory_bandwidth * efficiency.memory)

    times = transfer_times(work, chip, efficiency, num_devices, num_islands, mesh_sizes)
    can_hide = sum(time.seconds for time in times if time.can_hide)
    hidden = efficiency.overlap * min(can_hide, compute + memory)
    # Host transfers use separate links, but compete for the same time to overlap.
    host = work.host_bytes / (chip.host_bandwidth * efficiency.links)
    host -= efficiency.overlap * min(host, max(0.0, compute + memory - can_hide))
    communication = sum(time.seconds for time in times)
    busy = compute + memory + communication - hidden + host
    return StepTime(
        compute=compute,
        memory=memory,
        communication=communication,
        hidden=hidden,
        host=host,
        idle=busy * work.idle / (1 - work.idle),
        fixed=efficiency.per_step,
    )


def transfer_times(
    work: Work,
    chip: Chip,
    efficiency: Efficiency,
    num_devices: int,
    num_islands: int,
    mesh_sizes: Mapping[str, int],
) -> list[TransferTime]:
    """Returns the time of each transfer of a step; see `step_time`."""
    across = dict(zip(MESH_AXES, split_across_islands(dict(mesh_sizes), num_islands), strict=True))
    times = []
    for transfer in work.transfers:
        seconds = transfer_time(transfer, chip, efficiency, across, num_devices // num_islands)
        # On a TPU XLA also splits blocking sums and computes in between (Wang et al. 2023).
        times.append(TransferTime(transfer, seconds, transfer.is_async or chip.torus > 0))
    return times


def transfer_time(
    transfer: Transfer, chip: Chip, efficiency: Efficiency, across: Mapping[str, int], island: int
) -> float:
    """Returns the duration of a transfer in seconds, without other traffic on its links.

    A group of a · w devices has w devices in each of a islands. Each network interface receives 1/w of the data that
    its island lacks, S (1 - 1/a) / w. Within the island the data then passes around a ring. Both are pipelined, so the
    slower one determines the time.

    Args:
        transfer: the transfer.
        chip: kind of device.
        efficiency: constants for its links.
        across: by mesh axis, the factor of its size that crosses islands.
        island: number of devices in an island.
    """
    outer = math.prod(across[axis] for axis in transfer.axes)
    inner = max(1, transfer.group // outer)
    within = chip.link_bandwidth * efficiency.links * _rings(inner, chip, island)
    network = chip.network_bandwidth * efficiency.network
    size = transfer.size
    if transfer.kind == 'collective-permute':
        # A ring that crosses islands is as slow as its network link.
        seconds = size / network if outer > 1 else size / within
    elif transfer.kind == 'all-to-all':
        # In a ring of links each piece travels a quarter of the way; a switch connects devices directly.
        ring = size * inner / 4 if chip.torus else size * (1 - 1 / inner)
        seconds = max(ring / within, size * (1 - 1 / outer) / network)
    else:
        ways = 2 if transfer.kind == 'all-reduce' else 1
        seconds = ways * max(size * (1 - 1 / inner) / within, size * (1 - 1 / outer) / inner / network)
    return transfer.count * (seconds + efficiency.latency)


def _rings(group: int, chip: Chip, island: int) -> float:
    """Returns the number of rings of links that a group can use at the same time; 1 with a switch.

    A TPU has a ring along each dimension of its torus. Slices are assumed to be as cubic as possible, which gives the
    number of dimensions that a group spans.
    """
    if not chip.torus or group == 1:
        return 1.0
    side = max(2.0, island ** (1 / chip.torus))
    dimensions = min(chip.torus, max(1, round(math.log(group) / math.log(side))))
    return dimensions * (1.0 if island >= CLOSED_TORUS[chip.torus] else 0.5)


def tokens_per_second(seconds: float, *, global_batch: int, seq_len: int) -> float:
    """Returns the throughput of all devices together."""
    return global_batch * seq_len / seconds


def mfu(config: Config, seq_len: int, *, tokens_per_second: float, num_devices: int, tflops: float) -> Mfu:
    """Returns the MFU on `num_devices` devices with a peak of `tflops` each."""
    flops = step_flops(config, seq_len)
    peak = num_devices * tflops * 1e12
    return Mfu(tokens_per_second * flops.causal / peak, tokens_per_second * flops.full / peak)
