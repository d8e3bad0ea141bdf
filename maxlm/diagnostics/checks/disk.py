"""Check `disk`: free space for a run's checkpoints, and write speed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path

from maxlm.config.schema import AUTO, Config, MeshConfig
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, warning
from maxlm.errors import InputError, os_message
from maxlm.formatting import GIB, format_bytes, format_rate
from maxlm.storage.filesystem import is_url

# Default if neither the config nor the data set defines a vocabulary: that of GPT-2.
DEFAULT_VOCAB_SIZE = 50_257


def checkpoint_bytes(config: Config | None) -> int | None:
    """Returns the bytes of parameters, average and optimizer state over all devices; None without a valid config."""
    if config is None:
        return None
    # These modules import JAX, and the checks must also run without it.
    from maxlm.checkpoint.frozen_models import with_frozen_models
    from maxlm.config.resolve import resolve
    from maxlm.data.dataset.records import load_manifest
    from maxlm.planning.estimate.state_bytes import planned_state_bytes

    vocabulary = config.model.vocab_size
    path = config.data.sources[0][0].partition('#')[0] if config.data.sources else config.data.path
    if not vocabulary and not is_url(path):
        try:
            vocabulary = load_manifest(Path(path), complete=False).vocab_size
        except InputError:
            # The check `data` reports this error.
            vocabulary = 0
    # The total size does not depend on sharding.
    unsharded = dataclasses.replace(
        config,
        mesh=MeshConfig(fsdp=1),
        model=dataclasses.replace(config.model, attention='auto', norm_kernel='xla', fp8_kernel='xla'),
        train=dataclasses.replace(
            config.train,
            per_device_batch_size=0
            if config.train.per_device_batch_size == AUTO
            else config.train.per_device_batch_size,
        ),
    )
    try:
        resolved = resolve(
            with_frozen_models(unsharded, is_planned=True),
            platform='cpu',
            num_devices=1,
            vocab_size=vocabulary or DEFAULT_VOCAB_SIZE,
            windows=1,
        )
    except InputError:
        return None
    return sum(planned_state_bytes(resolved))


MIN_FREE, WARN_FREE = GIB, 10 * GIB
# Slower than any disk sold for servers.
MIN_BYTES_PER_SECOND = 50e6
FEW_INODES = 10_000
# Writing stops when either limit is reached.
WRITTEN_BYTES, WRITE_SECONDS = 2**28, 3.0
CHUNK_BYTES = 2**24


def check_disk(context: CheckContext) -> CheckResult:
    """Checks space and speed of the workdir.

    Checks the cache directory if the workdir is remote, and the current directory if there is no workdir.
    """
    directory = nearest_directory(context)
    try:
        usage = shutil.disk_usage(directory)
        inodes = os.statvfs(directory).f_favail
        speed = measure_write_speed(directory)
    except OSError as error:
        return failure(f'{error.filename or directory}: {os_message(error)}', 'choose a writable directory')
    checkpoint = checkpoint_bytes(context.config)
    num_kept = 0
    if context.config and not context.workdir.startswith(('gs://', 'gcs://')):
        # One more, because a new checkpoint is complete before an old one is deleted.
        settings = context.config.checkpoint
        num_kept = settings.max_to_keep + settings.keep_best + 1
        if settings.max_bytes and checkpoint:
            num_kept = min(num_kept, max(2, settings.max_bytes // checkpoint))
    return evaluate_disk(
        directory, usage.free, inodes, speed, checkpoint or 0, num_kept, min_free=int(context.min_free_gib * GIB)
    )


def nearest_directory(context: CheckContext) -> Path:
    """Returns the nearest existing parent of the directory that the run writes to."""
    target = Path(context.workdir or '.')
    if is_url(context.workdir):
        target = Path(context.config.data.cache_dir if context.config else '~/.cache/maxlm')
    with contextlib.suppress(RuntimeError):
        target = target.expanduser()
    return next(path for path in (target.absolute(), *target.absolute().parents) if path.is_dir())


def evaluate_disk(
    directory: Path, free: int, inodes: int, speed: float, checkpoint: int, num_kept: int, *, min_free: int = 0
) -> CheckResult:
    """Evaluates a file system.

    Args:
        directory: the tested directory.
        free: free bytes.
        inodes: number of files that can still be created; 0: the file system has no limit.
        speed: bytes/s written to the disk.
        checkpoint: bytes of one checkpoint; 0: unknown.
        num_kept: maximum number of checkpoints at a time.
        min_free: free bytes below which the check fails.
    """
    findings = []
    message = f'{directory}: {format_bytes(free)} free, writes {format_rate(speed)}'
    if num_kept and checkpoint:
        message += f'; a checkpoint of {format_bytes(checkpoint)} takes {checkpoint / speed:.1f} s'
    if free < MIN_FREE:
        findings.append(failure(message, 'free disk space, or choose another --workdir'))
    elif free < min_free:
        findings.append(
            failure(
                f'{message}, less than --min-free-gib={min_free / GIB:g}',
                'free disk space, or choose another --workdir',
            )
        )
    elif free < num_kept * checkpoint:
        findings.append(
            failure(
                f'{message}, and up to {num_kept} checkpoints are kept',
                'lower checkpoint.max_to_keep, free disk space, or choose another --workdir',
            )
        )
    elif free < WARN_FREE:
        findings.append(warning(message, 'free disk space: logs and checkpoints grow'))
    if 0 < inodes < FEW_INODES:
        findings.append(warning(f'{directory}: only {inodes:,} more files can be created', 'remove small files'))
    if speed < MIN_BYTES_PER_SECOND:
        findings.append(
            warning(f'{directory}: writes {format_rate(speed)}', 'use a faster disk: slow saves delay steps')
        )
    return combine(findings or [ok(message)])


def measure_write_speed(directory: Path) -> float:
    """Returns the bytes/s written to the disk (with fsync), using an unnamed temporary file.

    Raises:
        OSError: the file cannot be written.
    """
    # Random data, because a compressing file system would appear faster than its disk.
    chunk = os.urandom(CHUNK_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began = time.perf_counter()
        written = 0
        while written < WRITTEN_BYTES and time.perf_counter() - began < WRITE_SECONDS:
            written += file.write(chunk)
            # Sync each chunk, so that a slow disk is detected before much data is buffered.
            os.fsync(file.fileno())
        return written / (time.perf_counter() - began)
