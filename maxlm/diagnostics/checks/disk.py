"""The check `disk`: room for a run's checkpoints, and how fast they are written."""

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
from maxlm.diagnostics.result import CheckResult, failure, ok, together, warning
from maxlm.errors import InputError, os_message
from maxlm.formatting import format_bytes, format_rate
from maxlm.hardware.chips import GIB
from maxlm.storage.filesystem import is_url

# Where neither config nor data set tells: that of GPT-2.
USUAL_VOCABULARY = 50_257


def checkpoint_bytes(config: Config | None) -> int | None:
    """Bytes of parameters, average and optimizer state over all devices; None without a config that fits together."""
    if config is None:
        return None
    # JAX comes with these; a machine is looked at without them too.
    from maxlm.config.resolve import resolve
    from maxlm.data.dataset.records import load_manifest
    from maxlm.planning.estimate.state_bytes import planned_state_bytes

    vocabulary = config.model.vocab_size
    path = config.data.sources[0][0].partition('#')[0] if config.data.sources else config.data.path
    if not vocabulary and not is_url(path):
        try:
            vocabulary = load_manifest(Path(path), complete=False).vocab_size
        except InputError:
            # The check of the data says so.
            vocabulary = 0
    # The size of the whole does not depend on where its parts are.
    whole = dataclasses.replace(
        config,
        mesh=MeshConfig(fsdp=1),
        model=dataclasses.replace(config.model, attention='auto'),
        train=dataclasses.replace(
            config.train,
            per_device_batch_size=0
            if config.train.per_device_batch_size == AUTO
            else config.train.per_device_batch_size,
        ),
    )
    try:
        resolved = resolve(whole, platform='cpu', num_devices=1, vocab_size=vocabulary or USUAL_VOCABULARY, windows=1)
    except InputError:
        return None
    return sum(planned_state_bytes(resolved))


LEAST_FREE, ENOUGH_FREE = GIB, 10 * GIB
# Slower than any disk that is sold for servers.
SLOW = 50e6
FEW_INODES = 10_000
# Written in pieces until so much is written or so long has passed.
WRITTEN_BYTES, WRITE_SECONDS = 2**28, 3.0
PIECE = 2**24


def check_disk(case: CheckContext) -> CheckResult:
    """Room and speed where the run writes; without a local workdir, where its cache is; without a run, here."""
    directory = place_of(case)
    try:
        usage = shutil.disk_usage(directory)
        inodes = os.statvfs(directory).f_favail
        speed = measure_write_speed(directory)
    except OSError as error:
        return failure(
            f'{error.filename or directory}: {os_message(error)}', 'choose a directory that can be written to'
        )
    checkpoint = checkpoint_bytes(case.config)
    kept = 0
    if case.config and not case.workdir.startswith(('gs://', 'gcs://')):
        # One more: what is new is whole before what is old is deleted.
        kept = case.config.checkpoint.max_to_keep + case.config.checkpoint.keep_best + 1
    return evaluate_disk(directory, usage.free, inodes, speed, checkpoint or 0, kept)


def place_of(case: CheckContext) -> Path:
    """The nearest directory that exists of where the run writes."""
    place = Path(case.workdir or '.')
    if is_url(case.workdir):
        place = Path(case.config.data.cache_dir if case.config else '~/.cache/maxlm')
    with contextlib.suppress(RuntimeError):
        place = place.expanduser()
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.is_dir())


def evaluate_disk(directory: Path, free: int, inodes: int, speed: float, checkpoint: int, kept: int) -> CheckResult:
    """The finding of a file system.

    Args:
        directory: that was looked at.
        free: bytes.
        inodes: files that there may still be; 0 = the file system has no such bound.
        speed: bytes/s that reach the disk.
        checkpoint: bytes of one; 0 = not known.
        kept: checkpoints that lie there at a time.
    """
    findings = []
    told = f'{directory}: {format_bytes(free)} free, writes {format_rate(speed)}'
    if kept and checkpoint:
        told += f'; a checkpoint of {format_bytes(checkpoint)} takes {checkpoint / speed:.1f} s'
    if free < LEAST_FREE:
        findings.append(failure(told, 'make room, or choose another --workdir'))
    elif free < kept * checkpoint:
        findings.append(
            failure(
                f'{told}, and {kept} of them are there at a time',
                'lower checkpoint.max_to_keep, make room, or choose another --workdir',
            )
        )
    elif free < ENOUGH_FREE:
        findings.append(warning(told, 'make room: a log and checkpoints grow'))
    if 0 < inodes < FEW_INODES:
        findings.append(warning(f'{directory}: room for {inodes:,} files only', 'remove small files'))
    if speed < SLOW:
        findings.append(
            warning(f'{directory}: writes {format_rate(speed)}', 'take a faster disk: saving will hold up steps')
        )
    return together(findings or [ok(told)])


def measure_write_speed(directory: Path) -> float:
    """Bytes/s that reach the disk (fsync), of a file that has no name and is gone afterwards.

    Raises:
        OSError: it cannot be written.
    """
    # Random, or a file system that packs would be taken for a fast one.
    piece = os.urandom(PIECE)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began = time.perf_counter()
        written = 0
        while written < WRITTEN_BYTES and time.perf_counter() - began < WRITE_SECONDS:
            written += file.write(piece)
            # Each piece, so that a slow disk shows before there is much to wait for.
            os.fsync(file.fileno())
        return written / (time.perf_counter() - began)
