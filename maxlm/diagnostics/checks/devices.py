"""Checks `processes`, `devices` and `memory`: JAX in this process and the other processes of the run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, CheckStatus, combine, failure, ok, skipped, warning
from maxlm.errors import InputError
from maxlm.formatting import format_bytes

# Maximum difference of clocks. Larger ones make it hard to compare logs of several machines.
MAX_CLOCK_SKEW = 1.0
# Minimum fraction of a device's memory that JAX should get.
MIN_MEMORY_FRACTION = 0.7
# Maximum fraction of JAX's memory that may already be in use.
MAX_USED_FRACTION = 0.02


def check_processes(context: CheckContext) -> CheckResult:
    """Connects to the other processes as a run does, and compares clocks."""
    from maxlm.runtime.initialize import detect_cluster, detect_process_env, initialize
    from maxlm.runtime.rendezvous import RendezvousError

    environment = context.environment
    if (
        detect_process_env(environment) is None
        and detect_cluster(environment) is None
        and not context.hardware.tpu_chips
    ):
        return skipped('the run has one process')
    try:
        initialize(environment)
    except RendezvousError as error:
        return failure(str(error), 'start all machines at the same time, with the same variables; open the port')
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return skipped('the run has one process')
    multihost_utils.sync_global_devices('maxlm.doctor')
    now = time.time()
    # Use 32 bits, because JAX truncates wider numbers by default.
    clock = np.array([int(now) % 10**6, int(now % 1 * 1e6)], np.int32)
    gathered = np.asarray(multihost_utils.process_allgather(clock), np.float64)
    return evaluate_clocks([float(seconds + micros / 1e6) for seconds, micros in gathered])


def evaluate_clocks(clocks: Sequence[float]) -> CheckResult:
    """Evaluates the clocks of the processes at one moment, in seconds."""
    median = sorted(clocks)[len(clocks) // 2]
    worst = max(range(len(clocks)), key=lambda process: abs(clocks[process] - median))
    skew = abs(clocks[worst] - median)
    message = f'{len(clocks)} processes are connected'
    if skew > MAX_CLOCK_SKEW:
        return warning(
            f'{message}; the clock of process {worst} is {skew:,.1f} s off',
            'synchronize the clock: timedatectl set-ntp true',
        )
    return ok(f'{message}, their clocks within {skew * 1000:.0f} ms')


def check_devices(context: CheckContext) -> CheckResult:
    """Checks number and kind of the devices, and that the mesh fits them."""
    import jax

    return evaluate_devices(jax.devices(), context)


def evaluate_devices(devices: Sequence[Any], context: CheckContext) -> CheckResult:
    """Evaluates JAX's devices, by their `device_kind` and `process_index`."""
    kinds = Counter(device.device_kind for device in devices)
    message = ', '.join(f'{count} × {kind}' for kind, count in kinds.items())
    if len(kinds) > 1:
        return failure(f'devices of several kinds: {message}', 'choose devices of one kind with CUDA_VISIBLE_DEVICES')
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        max_count = max(counts.values())
        fewer = {process: count for process, count in counts.items() if count < max_count}
        process, count = next(iter(fewer.items()))
        return failure(
            f'process {process} has {count} devices, other processes have up to {max_count}',
            f'check the machine of process {process}',
        )
    if len(counts) > 1:
        message += f' in {len(counts)} processes'
    if context.config is not None:
        from maxlm.config.mesh import resolve_mesh

        try:
            mesh = resolve_mesh(context.config.mesh, len(devices))
        except InputError as error:
            return failure(str(error), 'set mesh.*, or use another number of devices')
        sizes = ' '.join(f'{axis}={size}' for axis, size in mesh.sizes.items() if size > 1)
        message += f', mesh {sizes or "of one device"}'
    return ok(message)


def check_memory(context: CheckContext) -> CheckResult:
    """Checks the memory of each device that JAX may use."""
    import jax

    from maxlm.hardware.chips import find_chip

    findings = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        chip = find_chip(device.device_kind)
        total = chip.memory if chip else None
        if limit := stats.get('bytes_limit'):
            findings.append(evaluate_memory(f'device {device.id}', limit, stats.get('bytes_in_use', 0), total))
    if not findings:
        return skipped(f'{jax.default_backend()} devices do not report their memory')
    if all(finding.status is CheckStatus.OK for finding in findings):
        return ok(f'each: {findings[0].message.partition(": ")[2]}')
    return combine(findings)


def evaluate_memory(name: str, limit: int, used: int, total: int | None) -> CheckResult:
    """Evaluates one device's memory, in bytes. `total` None: unknown."""
    message = f'{name}: JAX can use {format_bytes(limit)}' + (f' of {format_bytes(total)}' if total else '')
    if total and limit < MIN_MEMORY_FRACTION * total:
        return warning(message, 'see the gpus check for other processes, or set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92')
    if used > MAX_USED_FRACTION * limit:
        return warning(f'{message}, and {format_bytes(used)} are in use', 'check which processes use it')
    return ok(message)
