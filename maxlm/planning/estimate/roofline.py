"""How long a step takes: what the work needs of each resource, and what of it happens at the same time.

Williams et al. 2009, "Roofline": work takes as long as its scarcest resource needs. A training step is a chain of
products, which are bound by arithmetic, and of elementwise kernels, which are bound by memory; their times add up.
Communication can go on beside both. Times of collectives are those of Austin et al. 2025, "How to Scale Your Model",
chapters 3 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from maxlm.config.schema import MESH_AXES, Config
from maxlm.errors import InputError
from maxlm.hardware.chips import Chip
from maxlm.parallel.layout import split_across_islands
from maxlm.planning.estimate.flops import step_flops
from maxlm.planning.estimate.transfers import Transfer
from maxlm.planning.estimate.work import Work

# Devices of a slice from which on each dimension of its torus is closed to a ring; below, half of the links are not
# there.
CLOSED_TORUS = {2: 256, 3: 64}


class Efficiency(NamedTuple):
    """What of a datasheet's figures a training step gets; `benchmarks.calibrate` fits them."""

    # Of the peak, in products of matrices.
    products: float
    # Of the peak, in a fused attention kernel.
    attention: float
    # Of the bandwidth of memory.
    memory: float
    # Of that of links within an island, and of the network.
    links: float = 0.8
    network: float = 0.8
    # Share of the communication beside computation that costs no time. The rest: first and last layers, for which there
    # is nothing to compute, and units and bandwidth that both need.
    overlap: float = 0.8
    # Seconds in which a collective has sent nothing yet, and that a step costs on top.
    latency: float = 20e-6
    per_step: float = 1e-3


class StepTime(NamedTuple):
    """Seconds of one step on each device."""

    # Products of matrices, attention included.
    compute: float
    # Elementwise kernels.
    memory: float
    # Collectives, and the part of them that happens during the two above.
    communication: float
    hidden: float
    # Host memory, as far as it is not hidden.
    host: float
    # A pipeline's stages waiting for each other.
    idle: float
    # Of fixed costs.
    fixed: float

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.communication - self.hidden + self.host + self.idle + self.fixed

    @property
    def bound(self) -> str:
        """What takes most of the step: compute | memory | communication | host | idle."""
        shares = {
            'compute': self.compute,
            'memory': self.memory,
            'communication': self.communication - self.hidden,
            'host': self.host,
            'idle': self.idle,
        }
        return max(shares, key=lambda name: shares[name])


class Mfu(NamedTuple):
    """Share of the peak that the model's own operations reach, by both conventions of `step_flops`."""

    causal: float
    full: float


class TransferTime(NamedTuple):
    """Seconds of all executions of a transfer."""

    transfer: Transfer
    seconds: float
    # The device can compute meanwhile.
    can_hide: bool


# Chips that are taken for another, of whose generation they are or which is nearest: nobody published enough of them.
LIKE = {
    **dict.fromkeys(('h100-pcie', 'h100-nvl', 'gh200', 'h200', 'b200', 'l40s', 'l40', 'l4', 'rtx4090'), 'h100'),
    **dict.fromkeys(('a100-40', 'a10g', 'v100'), 'a100'),
    **dict.fromkeys(('v2', 'v3', 'v4lite'), 'v4'),
    **dict.fromkeys(('v6e', 'v7x'), 'v5p'),
}
# Fitted to published figures; tests/benchmarks/test_calibrate.py fits them again.
_GPU = Efficiency(products=0.0, attention=0.377, memory=0.85, links=0.55, network=0.55, overlap=0.0, latency=20e-6)
_TPU = Efficiency(products=0.0, attention=0.6, memory=0.7, links=0.8, network=0.8, overlap=0.449, latency=5e-6)
EFFICIENCIES: dict[str, Efficiency] = {
    'a100': _GPU._replace(products=0.833),
    'h100': _GPU._replace(products=0.656),
    'v4': _TPU._replace(products=0.749),
    'v5e': _TPU._replace(products=0.912),
    'v5p': _TPU._replace(products=0.875),
}


def efficiency_of(chip: Chip) -> Efficiency:
    """The fitted constants of a chip.

    Raises:
        InputError: there are none, as of a CPU: measure them, `maxlm.planning.estimate.cpu`.
    """
    name = LIKE.get(chip.name, chip.name)
    if name not in EFFICIENCIES:
        raise InputError(f'{chip.name}: no efficiency is known; there is one for {", ".join([*EFFICIENCIES, *LIKE])}')
    return EFFICIENCIES[name]


def step_time(
    work: Work,
    chip: Chip,
    *,
    num_devices: int,
    num_islands: int,
    mesh_sizes: Mapping[str, int],
    efficiency: Efficiency | None = None,
) -> StepTime:
    """Seconds of a step.

    Args:
        work: of each device.
        chip: the device.
        num_devices: in the whole run.
        num_islands: nodes of GPUs or slices of TPUs; links within an island are fast.
        mesh_sizes: `mesh.sizes` of the resolved config.
        efficiency: constants other than the fitted ones of the chip.

    Raises:
        InputError: the mesh cannot be laid over so many islands.
    """
    efficiency = efficiency or efficiency_of(chip)
    peak = chip.tflops * 1e12
    # Products of 8-bit floats are taken to reach the same share of their own peak.
    products = (work.flops - work.fp8_flops) / peak + work.fp8_flops / (chip.fp8_tflops * 1e12)
    compute = products / efficiency.products + work.attention_flops / (peak * efficiency.attention)
    memory = work.memory_bytes / (chip.memory_bandwidth * efficiency.memory)

    times = transfer_times(work, chip, efficiency, num_devices, num_islands, mesh_sizes)
    can_hide = sum(time.seconds for time in times if time.can_hide)
    hidden = efficiency.overlap * min(can_hide, compute + memory)
    # What travels to the host and back takes other links, but the same time to hide in.
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
    """Of each transfer of a step; see `step_time`."""
    across = dict(zip(MESH_AXES, split_across_islands(dict(mesh_sizes), num_islands), strict=True))
    times = []
    for transfer in work.transfers:
        seconds = transfer_time(transfer, chip, efficiency, across, num_devices // num_islands)
        # On a TPU XLA also takes sums apart that a device would wait for, and computes in between (Wang et al. 2023).
        times.append(TransferTime(transfer, seconds, transfer.is_async or chip.torus > 0))
    return times


def transfer_time(
    transfer: Transfer, chip: Chip, efficiency: Efficiency, across: Mapping[str, int], island: int
) -> float:
    """Seconds of a transfer, alone on its links.

    Of a group of a · w devices with w in each of a islands, each network interface has to bring 1/w of what its island
    lacks, S (1 - 1/a) / w; within the island it then goes around in a ring. The two follow each other in pieces, so
    that the slower one counts.

    Args:
        transfer: what is sent.
        chip: the device.
        efficiency: of its links.
        across: by mesh axis, its factor that goes over the network.
        island: devices of an island.
    """
    outer = math.prod(across[axis] for axis in transfer.axes)
    inner = max(1, transfer.group // outer)
    within = chip.link_bandwidth * efficiency.links * _rings(inner, chip, island)
    network = chip.network_bandwidth * efficiency.network
    size = transfer.size
    if transfer.kind == 'collective-permute':
        # A ring that crosses islands waits for the link that does.
        seconds = size / network if outer > 1 else size / within
    elif transfer.kind == 'all-to-all':
        # Around a ring of links each piece goes a quarter of the way; through a switch it goes straight.
        ring = size * inner / 4 if chip.torus else size * (1 - 1 / inner)
        seconds = max(ring / within, size * (1 - 1 / outer) / network)
    else:
        ways = 2 if transfer.kind == 'all-reduce' else 1
        seconds = ways * max(size * (1 - 1 / inner) / within, size * (1 - 1 / outer) / inner / network)
    return transfer.count * (seconds + efficiency.latency)


def _rings(group: int, chip: Chip, island: int) -> float:
    """Rings of links that a group can use at the same time; 1 through a switch.

    A TPU has a ring along each dimension of its torus. Slices are taken to be as cubic as can be, so that a group has
    as many dimensions as its size has sides.
    """
    if not chip.torus or group == 1:
        return 1.0
    side = max(2.0, island ** (1 / chip.torus))
    dimensions = min(chip.torus, max(1, round(math.log(group) / math.log(side))))
    return dimensions * (1.0 if island >= CLOSED_TORUS[chip.torus] else 0.5)


def tokens_per_second(seconds: float, *, global_batch: int, window: int) -> float:
    """Of all devices together."""
    return global_batch * window / seconds


def mfu(config: Config, window: int, *, tokens_per_second: float, num_devices: int, tflops: float) -> Mfu:
    """Utilization of `num_devices` with a peak of `tflops` each."""
    flops = step_flops(config, window)
    peak = num_devices * tflops * 1e12
    return Mfu(tokens_per_second * flops.causal / peak, tokens_per_second * flops.full / peak)
