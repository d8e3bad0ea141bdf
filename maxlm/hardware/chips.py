"""Performance figures of devices: datasheets of accelerators and measurements of CPUs."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.kernels import MATMUL_CAPABILITIES
from maxlm.formatting import GIB

# Compute capability from which on GPUs multiply bfloat16 and TF32 on matrix units.
AMPERE = (8, 0)
# Number of bfloat16 products of a float32 product on a TPU, by JAX's precision; absent = 1.
PASSES = {
    **dict.fromkeys(('high', 'bfloat16_3x', 'tensorfloat32'), 3),
    **dict.fromkeys(('highest', 'float32'), 6),
}


class Peak(NamedTuple):
    """Peak throughput of a device, the denominator of MFU.

    Attributes:
        tflops: peak of one device; 0 = unknown.
        source: origin of the figure, for the log.
    """

    tflops: float
    source: str


@dataclasses.dataclass(frozen=True)
class Chip:
    """Datasheet figures of one device. Bandwidths are bytes/s of one device.

    Attributes:
        name: name in `--target=NAME:…`.
        platform: gpu, tpu or cpu.
        kind: part of JAX's `device_kind`.
        tflops: dense peak of 16-bit floats on matrix units (bfloat16; float16 on GPUs before Ampere), or the measured
            peak of a CPU. `peak` returns that of a dtype.
        memory: device memory in bytes.
        memory_bandwidth: read bandwidth of the device memory.
        per_node: number of devices with fast links between them: a GPU node, or the TPU chips of one host.
        link_bandwidth: from a GPU to the other GPUs of its node (NVLink, PCIe), in one direction; from a TPU along one
            axis of its torus, in both directions.
        network_bandwidth: from a device to other nodes or slices.
        host_bandwidth: between a device and the memory of its host, in one direction.
        torus: number of torus dimensions of a TPU, for compilation targets; 0 = GPU or CPU.
        capability: (major, minor) compute capability of a GPU; None = unknown, or not a GPU.
        float32_tflops: float32 peak of a GPU without its matrix units.
    """

    name: str
    platform: str
    kind: str
    tflops: float
    memory: int
    memory_bandwidth: float
    per_node: int
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    torus: int = 0
    capability: tuple[int, int] | None = None
    float32_tflops: float = 0.0

    def peak(self, dtype: str) -> Peak:
        """Returns the peak of matrix products in a dtype, at JAX's default precision (`jax_default_matmul_precision`).

        GPUs since Ampere multiply float32 in TF32 at half of the rate, or without matrix units at the precision
        `highest`. TPUs multiply float32 in 1, 3 or 6 bfloat16 passes at the precision default, `high` and `highest`.
        """
        settings: Any = jax.config
        precision = settings.jax_default_matmul_precision or 'default'
        if dtype == 'float32' and self.platform == 'tpu':
            passes = PASSES.get(precision, 1)
            return Peak(self.tflops / passes, f'float32 in {passes} bfloat16 passes' if passes > 1 else 'bfloat16')
        if self.platform != 'gpu' or self.capability is None:
            return Peak(self.tflops, 'bfloat16')
        has_matrix_units = self.capability >= AMPERE or dtype == 'float16'
        if dtype != 'float32' and has_matrix_units:
            return Peak(self.tflops, dtype)
        if self.capability >= AMPERE and PASSES.get(precision, 1) < PASSES['highest']:
            return Peak(self.tflops / 2, 'TF32')
        return Peak(self.float32_tflops, 'float32')

    @property
    def fp8_tflops(self) -> float:
        """Returns the dense FP8 peak: twice the bfloat16 peak on all GPUs with FP8, according to their datasheets."""
        return self.tflops * (2 if self.capability is not None and self.capability >= MATMUL_CAPABILITIES['fp8'] else 1)


def _gpu(
    capability: tuple[int, int],
    name: str,
    kind: str,
    tflops: float,
    float32_tflops: float,
    gb: float,
    tb_s: float,
    link_gb_s: float,
    **others: float,
) -> Chip:
    network, host = others.get('network_gb_s', 12.5), others.get('host_gb_s', 25.0)
    chip = Chip(name, 'gpu', kind, tflops, int(gb * 1e9), tb_s * 1e12, 8, link_gb_s * 1e9, network * 1e9, host * 1e9)
    return dataclasses.replace(chip, capability=capability, float32_tflops=float32_tflops)


def _tpu(name: str, kind: str, tflops: float, gib: int, tb_s: float, link_gb_s: float, **others: float) -> Chip:
    network, host = others.get('network_gb_s', 6.25), others.get('host_gb_s', 16.0)
    torus = 2 if name in ('v2', 'v3', 'v5e', 'v6e') else 3
    return Chip(name, 'tpu', kind, tflops, gib * GIB, tb_s * 1e12, 4, link_gb_s * 1e9, network * 1e9, host * 1e9, torus)


# `find_chip` uses the first entry whose kind is part of the device kind, so longer names precede their prefixes. JAX
# shows TPU v2, v3 and 7x as half chips and the others as complete chips; v5e and v6e are "lite".
# Sources: NVIDIA datasheets (a link is NVLink or PCIe in one direction; the network has 400, 200 or 100 Gb/s per GPU);
# Google Cloud pages on TPU architecture; Austin et al. 2025, "How to Scale Your Model", chapter 2.
CHIPS: tuple[Chip, ...] = (
    _gpu((9, 0), 'h100-pcie', 'H100 PCIe', 756.0, 51.2, 80, 2.0, 64, host_gb_s=50),
    _gpu((9, 0), 'h100-nvl', 'H100 NVL', 835.0, 60, 94, 3.9, 64, host_gb_s=50),
    _gpu((9, 0), 'h100', 'H100', 989.4, 66.9, 84.9, 3.35, 450, network_gb_s=50, host_gb_s=50),
    _gpu((9, 0), 'gh200', 'GH200', 989.4, 66.9, 96, 4.0, 450, network_gb_s=50, host_gb_s=400),
    _gpu((9, 0), 'h200', 'H200', 989.4, 66.9, 150.1, 4.8, 450, network_gb_s=50, host_gb_s=50),
    _gpu((10, 0), 'b200', 'B200', 2250.0, 75, 191.5, 7.7, 900, network_gb_s=50, host_gb_s=50),
    _gpu((8, 0), 'a100-40', 'A100-SXM4-40GB', 312.0, 19.5, 42.4, 1.555, 300, network_gb_s=25),
    _gpu((8, 0), 'a100', 'A100', 312.0, 19.5, 85.0, 2.039, 300, network_gb_s=25),
    _gpu((8, 6), 'a10g', 'A10G', 125.0, 31.2, 24, 0.6, 25),
    _gpu((8, 9), 'l40s', 'L40S', 362.0, 91.6, 48, 0.864, 25),
    _gpu((8, 9), 'l40', 'L40', 181.0, 90.5, 48, 0.864, 25),
    _gpu((8, 9), 'l4', 'L4', 121.0, 30.3, 24, 0.3, 25),
    _gpu((7, 0), 'v100', 'V100', 125.0, 15.7, 16, 0.9, 150),
    _gpu((8, 9), 'rtx4090', 'RTX 4090', 165.2, 82.6, 24, 1.008, 25),
    _gpu((8, 6), 'rtx3090', 'RTX 3090', 71.0, 35.6, 24, 0.936, 25),
    _gpu((8, 6), 'rtx3080', 'RTX 3080', 59.5, 29.8, 10, 0.76, 25),
    _tpu('v2', 'TPU v2', 22.5, 8, 0.35, 62.5),
    _tpu('v3', 'TPU v3', 61.5, 16, 0.45, 82),
    _tpu('v4lite', 'TPU v4 lite', 138.0, 8, 0.615, 90),
    _tpu('v4', 'TPU v4', 275.0, 32, 1.23, 90),
    _tpu('v5e', 'TPU v5 lite', 197.0, 16, 0.82, 90, network_gb_s=3.1),
    _tpu('v5e', 'TPU v5e', 197.0, 16, 0.82, 90, network_gb_s=3.1),
    _tpu('v5p', 'TPU v5', 459.0, 95, 2.77, 180),
    _tpu('v6e', 'TPU v6', 918.0, 32, 1.64, 180, network_gb_s=12.5, host_gb_s=32),
    _tpu('v7x', 'TPU7x', 1153.5, 96, 3.7, 200, network_gb_s=6.25, host_gb_s=16),
)


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of a JAX device kind, or None if it is unknown."""
    return next((chip for chip in CHIPS if chip.kind in device_kind), None)


def capability_of(device: Any) -> tuple[int, int] | None:
    """Returns the compute capability of a local GPU, or None for other devices."""
    capability = getattr(device, 'compute_capability', None)
    if device.platform != 'gpu' or not capability:
        return None
    major, minor = map(int, capability.split('.'))
    return major, minor


def find_peak(configured_tflops: float, dtype: str) -> Peak:
    """Returns the peak of the local devices in a dtype: configured, from the datasheet, or measured on a CPU."""
    device = jax.local_devices()[0]
    if configured_tflops:
        return Peak(configured_tflops, 'metrics.peak_tflops')
    if device.platform == 'cpu':
        # Virtual devices share the cores, so each gets an equal part of the measured throughput.
        return Peak(measure_matmul_tflops() / jax.local_device_count(), 'measured: 1024³ float32 products on this CPU')
    chip = find_chip(device.device_kind)
    if chip:
        peak = chip.peak(dtype)
        return Peak(peak.tflops, f'{device.device_kind}, {peak.source} datasheet')
    return Peak(0.0, f'unknown for {device.device_kind}; set metrics.peak_tflops')


def host_memory() -> int:
    """Returns the memory size of this machine in bytes."""
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


@functools.cache
def measure_matmul_tflops(size: int = 1024, rounds: int = 4, products: int = 4) -> float:
    """Returns the TFLOP/s of chained `size`³ float32 products on the default device, the best of `rounds`.

    A process measures once: a run needs the result for its plan and for MFU.
    """

    @jax.jit
    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(products):
            a = a @ b
        return a

    a = jnp.full((size, size), 1 / size, jnp.float32)
    compiled = chain.lower(a, a).compile()
    best = float('inf')
    for _ in range(rounds):
        start = time.perf_counter()
        compiled(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return products * 2 * size**3 / best / 1e12
