"""Checks `matmul` and `links`: measure devices and links, and compare them with datasheets and each other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, skipped, warning
from maxlm.formatting import format_rate

# Minimum fractions of the datasheet's peak, and of the median over devices, that a working device reaches.
MIN_PEAK_FRACTION, MIN_MEDIAN_FRACTION = 0.7, 0.9
# Minimum fraction of the link bandwidth that a large all-reduce reaches.
MIN_LINK_FRACTION = 0.5
# Rows of the square matrices of a product, and bytes per device in an all-reduce.
PRODUCT_SIZE = {'cpu': 1024}
SUM_BYTES = {'cpu': 2**22}
LARGE_PRODUCT, LARGE_SUM = 8192, 2**28
PRODUCTS = 4
ROUNDS = 10


def check_matmul(context: CheckContext) -> CheckResult:
    """Measures large products on each device of this process, one device after another."""
    import jax

    from maxlm.hardware.chips import find_chip
    from maxlm.hardware.device_stats import Accelerators, local_devices

    devices = jax.local_devices()
    platform = devices[0].platform
    # Virtual devices share the cores, so one device reaches the speed of all.
    chosen = devices[:1] if platform == 'cpu' else devices
    measured = {device.id: measure_matmul(device) for device in chosen}
    chip = find_chip(devices[0].device_kind)
    # Read immediately after the work, while a throttled device still reports it.
    throttled = {
        devices[reading['index']].id: ', '.join(reading['throttled'])
        for reading in Accelerators(local_devices()).read()
        if reading.get('throttled') and reading['index'] < len(devices)
    }
    kind = f'{"float32" if platform == "cpu" else "bfloat16"} products'
    return evaluate_matmul(measured, kind, chip.tflops if chip else 0.0, throttled)


def evaluate_matmul(measured: Mapping[int, float], kind: str, peak: float, throttled: Mapping[int, str]) -> CheckResult:
    """Evaluates the TFLOP/s of devices.

    Args:
        measured: device id → TFLOP/s.
        kind: description of the products.
        peak: peak of the datasheet in TFLOP/s; 0: unknown.
        throttled: ids of throttled devices → reasons.
    """
    median = statistics.median(measured.values())
    message = f'{median:,.3g} TFLOP/s in {kind}'
    message += f', {median / peak:.0%} of {peak:,.4g}' if peak else '; no datasheet value to compare with'
    if len(measured) > 1:
        message += f', median of {len(measured)} devices'
    findings = []
    slow = [device for device, tflops in measured.items() if tflops < MIN_MEDIAN_FRACTION * median]
    if slow:
        named = ', '.join(
            f'device {device} {measured[device]:,.3g}{_throttle_note(device, throttled)}' for device in slow
        )
        findings.append(
            warning(
                f'{message}; slower: {named}',
                'a run is as fast as its slowest device: exclude or replace it',
            )
        )
    if peak and median < MIN_PEAK_FRACTION * peak:
        reasons = ', '.join(sorted({*throttled.values()}))
        findings.append(
            warning(
                message + (f'; throttled by {reasons}' if reasons else ''),
                'see the gpus check for other processes; check power limit, cooling and clocks',
            )
        )
    return combine(findings or [ok(message)])


def _throttle_note(device: int, throttled: Mapping[int, str]) -> str:
    return f' ({throttled[device]})' if device in throttled else ''


def measure_matmul(device: Any, size: int = 0) -> float:
    """Returns the TFLOP/s of a chain of products on one device: the best of ROUNDS rounds.

    Products use bfloat16, or float32 on a CPU. `size` is the number of rows of a product; 0: large enough for the kind
    of device to reach its best speed.
    """
    import jax
    import jax.numpy as jnp

    size = size or PRODUCT_SIZE.get(device.platform, LARGE_PRODUCT)
    dtype = jnp.float32 if device.platform == 'cpu' else jnp.bfloat16

    @jax.jit
    def chain(a: jax.Array) -> jax.Array:
        product = a
        for _ in range(PRODUCTS):
            product = product @ a
        return product

    # Each row sums to 1, so that no product overflows or vanishes.
    a = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)
    seconds = _best(lambda: chain(a).block_until_ready())
    return PRODUCTS * 2 * size**3 / seconds / 1e12


def check_links(context: CheckContext) -> CheckResult:
    """Measures all-reduces along each axis of the run's mesh; without a run, over all devices."""
    import jax

    from maxlm.config.mesh import resolve_mesh
    from maxlm.config.schema import MeshConfig
    from maxlm.hardware.chips import find_chip
    from maxlm.parallel.layout import make_layout

    if jax.device_count() == 1:
        return skipped('one device has no links')
    mesh = make_layout(resolve_mesh(context.config.mesh if context.config else MeshConfig(), jax.device_count())).mesh
    chip = find_chip(jax.devices()[0].device_kind)
    findings = []
    for axis, group in mesh.shape.items():
        if group == 1:
            continue
        speed, is_right = measure_sum(mesh, axis)
        expected = expected_bandwidth(chip, mesh, axis) if chip else 0.0
        findings.append(evaluate_links(f'{axis}={group}', speed, expected, is_right))
    return combine(findings)


def evaluate_links(name: str, speed: float, expected: float, is_right: bool) -> CheckResult:
    """Evaluates all-reduces along one axis.

    Args:
        name: name of the axis.
        speed: bytes/s that each device sent.
        expected: bandwidth of its links; 0: unknown.
        is_right: whether the sums were correct.
    """
    message = f'{name}: {format_rate(speed)} sent per device in an all-reduce'
    if not is_right:
        return failure(f'{name}: an all-reduce returned a wrong sum', 'do not train on this machine; check its devices')
    if expected:
        message += f', {speed / expected:.0%} of {format_rate(expected)}'
    if speed < MIN_LINK_FRACTION * expected:
        return warning(message, 'check links and topology (nvidia-smi topo -m, NCCL_DEBUG=INFO)')
    return ok(message)


def measure_sum(mesh: Any, axis: str, size: int = 0) -> tuple[float, bool]:
    """Returns the bytes/s per device in an all-reduce (`busbw` of nccl-tests), and True if the sums are correct.

    `size` is the number of bytes per device; 0: large enough for the kind of device to reach its best speed.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    group = mesh.shape[axis]
    device = mesh.devices.flat[0]
    size = size or SUM_BYTES.get(device.platform, LARGE_SUM)
    spec = PartitionSpec(tuple(mesh.axis_names))
    elements = size // 4
    make = jax.jit(
        lambda: jnp.ones((mesh.devices.size * elements,), jnp.float32), out_shardings=NamedSharding(mesh, spec)
    )
    # Each round depends on the sum of the previous one, so none can be optimized away.
    sums = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, axis) / group, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
    ones = make()
    seconds = _best(lambda: jax.block_until_ready(sums(ones)))
    is_right = all(np.all(np.asarray(shard.data[:1024]) == 1.0) for shard in sums(ones).addressable_shards)
    return 2 * (group - 1) / group * size / seconds, is_right


def expected_bandwidth(chip: Any, mesh: Any, axis: str) -> float:
    """Returns the datasheet bandwidth out of a device along an axis; between nodes, all links of a node are shared."""
    import numpy as np

    from maxlm.parallel.layout import island_of

    islands = np.vectorize(island_of, otypes=[int])(mesh.devices)
    groups = np.moveaxis(islands, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    crossing = [group for group in groups if len(set(group)) > 1]
    if not crossing:
        return float(chip.link_bandwidth)
    devices_per_island = min(math.floor(len(group) / len(set(group))) for group in crossing)
    return float(min(chip.link_bandwidth, chip.network_bandwidth * devices_per_island))


def _best(run: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of ROUNDS rounds, after one that compiles."""
    run()
    best = math.inf
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
