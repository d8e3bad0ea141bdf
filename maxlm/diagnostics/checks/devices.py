"""The checks `processes`, `devices` and `memory`: what JAX has in this process, and with whom."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, CheckStatus, failure, ok, skipped, together, warning
from maxlm.errors import InputError
from maxlm.formatting import format_bytes

# Clocks of several machines that differ by more make their logs hard to read together.
APART = 1.0
# Of a device's memory, what JAX should get at least.
LEAST_SHARE = 0.7
# Of what JAX may take, what others may have by now.
MOST_TAKEN = 0.02


def check_processes(case: CheckContext) -> CheckResult:
    """Joins the others, as a run does, and compares clocks."""
    from maxlm.runtime.initialize import detect_process_env, detected_tasks, initialize
    from maxlm.runtime.rendezvous import RendezvousError

    environment = case.environment
    if detect_process_env(environment) is None and detected_tasks(environment) is None and not case.hardware.tpu_chips:
        return skipped('a run of one process')
    try:
        initialize(environment)
    except RendezvousError as error:
        return failure(str(error), 'start it on all machines at once, with the same variables; open the port')
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return skipped('a run of one process')
    multihost_utils.sync_global_devices('maxlm.doctor')
    now = time.time()
    # In 32 bits, which is what JAX keeps of numbers.
    parts = np.array([int(now) % 10**6, int(now % 1 * 1e6)], np.int32)
    gathered = np.asarray(multihost_utils.process_allgather(parts), np.float64)
    return evaluate_clocks([float(seconds + micros / 1e6) for seconds, micros in gathered])


def evaluate_clocks(clocks: Sequence[float]) -> CheckResult:
    """The finding of the processes' clocks at one moment, in seconds."""
    middle = sorted(clocks)[len(clocks) // 2]
    worst = max(range(len(clocks)), key=lambda process: abs(clocks[process] - middle))
    apart = abs(clocks[worst] - middle)
    told = f'{len(clocks)} processes are together'
    if apart > APART:
        return warning(
            f'{told}; the clock of process {worst} is {apart:,.1f} s off', 'synchronize it: timedatectl set-ntp true'
        )
    return ok(f'{told}, their clocks within {apart * 1000:.0f} ms')


def check_devices(case: CheckContext) -> CheckResult:
    """How many devices the run has, of which kind, and whether its mesh fits them."""
    import jax

    return evaluate_devices(jax.devices(), case)


def evaluate_devices(devices: Sequence[Any], case: CheckContext) -> CheckResult:
    """The finding of JAX's devices; needed of each: `device_kind`, `process_index`."""
    kinds = Counter(device.device_kind for device in devices)
    told = ', '.join(f'{count} × {kind}' for kind, count in kinds.items())
    if len(kinds) > 1:
        return failure(f'devices of several kinds: {told}', 'choose those of one kind with CUDA_VISIBLE_DEVICES')
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        most = max(counts.values())
        fewer = {process: count for process, count in counts.items() if count < most}
        process, count = next(iter(fewer.items()))
        return failure(f'process {process} has {count} devices, others {most}', f'look at the machine of {process}')
    if len(counts) > 1:
        told += f' in {len(counts)} processes'
    if case.config is not None:
        from maxlm.config.mesh import resolve_mesh

        try:
            mesh = resolve_mesh(case.config.mesh, len(devices))
        except InputError as error:
            return failure(str(error), 'set mesh.*, or take another number of devices')
        sizes = ' '.join(f'{axis}={size}' for axis, size in mesh.sizes.items() if size > 1)
        told += f', mesh {sizes or "of one device"}'
    return ok(told)


def check_memory(case: CheckContext) -> CheckResult:
    """What of a device's memory JAX may take, and whether it is free."""
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
        return skipped(f'devices of kind {jax.default_backend()} do not tell')
    if all(finding.status is CheckStatus.OK for finding in findings):
        return ok(f'each: {findings[0].found.partition(": ")[2]}')
    return together(findings)


def evaluate_memory(name: str, limit: int, used: int, total: int | None) -> CheckResult:
    """The finding of one device's memory, in bytes; `total` None = not known."""
    told = f'{name}: JAX may take {format_bytes(limit)}' + (f' of {format_bytes(total)}' if total else '')
    if total and limit < LEAST_SHARE * total:
        return warning(told, 'see gpus for who has the rest, or set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92')
    if used > MOST_TAKEN * limit:
        return warning(f'{told}, and {format_bytes(used)} are taken', 'see who has them')
    return ok(told)
