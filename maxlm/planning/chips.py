"""What a device can do: datasheet peaks, and what a CPU reaches in fact."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Part of `device_kind` → dense bfloat16 TFLOP/s by the vendor's datasheet; the first that matches counts, so longer
# names stand before their beginnings. JAX shows TPU v2 and v3 as half chips, later generations as whole ones, and
# v5e and v6e as "lite".
DATASHEET_TFLOPS: tuple[tuple[str, float], ...] = (
    ('H100 PCIe', 756.0),
    ('H100 NVL', 835.0),
    ('H100', 989.4),
    ('H200', 989.4),
    ('GH200', 989.4),
    ('B200', 2250.0),
    ('A100', 312.0),
    ('A10G', 125.0),
    ('L40S', 362.0),
    ('L40', 181.0),
    ('L4', 121.0),
    ('V100', 125.0),
    ('RTX 4090', 165.2),
    ('TPU v2', 22.5),
    ('TPU v3', 61.5),
    ('TPU v4 lite', 138.0),
    ('TPU v4', 275.0),
    ('TPU v5 lite', 197.0),
    ('TPU v5e', 197.0),
    ('TPU v5', 459.0),
    ('TPU v6', 918.0),
    ('TPU7x', 2307.0),
)


class Peak(NamedTuple):
    """What MFU is divided by."""

    # Of one device; 0 = unknown.
    tflops: float
    # Where the figure comes from, for the log.
    source: str


def find_peak(configured_tflops: float) -> Peak:
    """The peak of this machine's devices: the configured one, else the datasheet's, else measured on a CPU."""
    device = jax.local_devices()[0]
    if configured_tflops:
        return Peak(configured_tflops, 'metrics.peak_tflops')
    if device.platform == 'cpu':
        # Virtual devices share the cores, so each has its part of what they reach together.
        return Peak(measure_matmul_tflops() / jax.local_device_count(), 'measured: 1024³ float32 products on this CPU')
    for kind, tflops in DATASHEET_TFLOPS:
        if kind in device.device_kind:
            return Peak(tflops, f'{device.device_kind}, bfloat16 datasheet')
    return Peak(0.0, f'unknown for {device.device_kind}; set metrics.peak_tflops')


def measure_matmul_tflops(size: int = 1024, rounds: int = 7, products: int = 4) -> float:
    """TFLOP/s of a chain of `size`³ float32 products on the default device: the best of `rounds`."""

    @jax.jit
    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(products):
            a = a @ b
        return a

    a = jnp.full((size, size), 1 / size, jnp.float32)
    chain(a, a).block_until_ready()
    best = float('inf')
    for _ in range(rounds):
        start = time.perf_counter()
        chain(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return products * 2 * size**3 / best / 1e12
