"""Checks `ram`, `shm` and `files`: memory, shared memory and open files of the host."""

from __future__ import annotations

import contextlib
import resource
import shutil
from pathlib import Path

from maxlm.diagnostics.checks.disk import checkpoint_bytes
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, failure, ok, skipped, warning
from maxlm.formatting import GIB, format_bytes

# Memory of Python, JAX and the data pipeline in a small run.
MIN_RAM = 2 * GIB
CGROUP = Path('/sys/fs/cgroup')
SHM = Path('/dev/shm')
MIN_SHM = GIB
# Each source, worker and connection needs several.
WARN_FILES, MIN_FILES = 4096, 512


def check_ram(context: CheckContext) -> CheckResult:
    """Checks the available host memory, within the limits of a container."""
    import psutil

    memory = psutil.virtual_memory()
    state = checkpoint_bytes(context.config)
    return evaluate_ram(memory.total, memory.available, read_cgroup(CGROUP), state and state // context.num_processes)


def evaluate_ram(total: int, available: int, cgroup: tuple[int, int] | None, state: int | None) -> CheckResult:
    """Evaluates host memory, in bytes.

    Args:
        total: memory of the machine.
        available: memory that is free or can be reclaimed.
        cgroup: limit and usage of the container; None: no limit.
        state: bytes that a checkpoint copies to this host; None: unknown.
    """
    suffix = ''
    if cgroup is not None and cgroup[0] < total:
        total, available = cgroup[0], min(available, cgroup[0] - cgroup[1])
        suffix = ' available to this container'
    message = f'{format_bytes(available)} free of {format_bytes(total)}{suffix}'
    if available < MIN_RAM:
        return failure(message, f'free memory: a run takes {format_bytes(MIN_RAM)} at least')
    if state and available < state:
        return warning(
            f'{message}; a checkpoint copies {format_bytes(state)} into memory',
            'use a machine with more memory, or more machines',
        )
    if available < 0.1 * total:
        return warning(message, 'check which processes use the rest')
    return ok(message)


def read_cgroup(root: Path) -> tuple[int, int] | None:
    """Returns the memory limit and usage of this container; None if there is no limit (cgroup v2, then v1)."""
    for limit, usage in (
        ('memory.max', 'memory.current'),
        ('memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes'),
    ):
        with contextlib.suppress(OSError, ValueError):
            return int((root / limit).read_text()), int((root / usage).read_text())
    return None


def check_shm(context: CheckContext) -> CheckResult:
    """Checks shared memory, which workers use for batches and NCCL for transfers between GPUs."""
    if not SHM.is_dir():
        return skipped(f'{SHM} does not exist')
    usage = shutil.disk_usage(SHM)
    return evaluate_shm(usage.total, usage.free)


def evaluate_shm(total: int, free: int) -> CheckResult:
    """Evaluates the bytes of shared memory."""
    message = f'{format_bytes(free)} free of {format_bytes(total)}'
    if free < MIN_SHM:
        return warning(message, 'give the container more, e.g. --shm-size=8g, or delete leftover files in /dev/shm')
    return ok(message)


def check_files(context: CheckContext) -> CheckResult:
    """Checks the limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return evaluate_files(soft, hard)


def evaluate_files(soft: int, hard: int) -> CheckResult:
    """Evaluates the limits on open files; RLIM_INFINITY: no limit."""
    if soft == resource.RLIM_INFINITY:
        return ok('no limit on open files')
    most = '65536' if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
    message = f'{soft:,} open files allowed'
    if soft < MIN_FILES:
        return failure(message, f'ulimit -n {most}')
    if soft < WARN_FILES:
        return warning(f'{message}: few for many shards or workers', f'ulimit -n {most}')
    return ok(message)
