"""Copies one step from a directory or bucket into a workdir: resumable, verified and atomic."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from etils import epath

from maxlm.checkpoint.checksums import ITEM, corrupt_arrays
from maxlm.checkpoint.drop_optimizer import OPTIMIZER, drop_optimizer_checksums
from maxlm.checkpoint.item_metadata import JSON_FILE
from maxlm.checkpoint.listing import resolve_checkpoint
from maxlm.checkpoint.manager import find_step
from maxlm.errors import InputError
from maxlm.log import BYTES, logger, progress_bar
from maxlm.storage.download import RemoteFile
from maxlm.storage.download_tree import fetch_tree, list_tree
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path, is_url, read_bytes, stat
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES
from maxlm.workdir.files import CONFIG, MODEL_FILES
from maxlm.workdir.files import METRICS_FILE as METRICS
from maxlm.workdir.run_storage import cache_directory
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR

# Directory for incomplete copies, inside the directory of checkpoints.
PARTIAL_DIR = '_fetching'
# Default of data.cache_dir.
CACHE = '~/.cache/maxlm'
THREADS = 8


class FetchResult(NamedTuple):
    """Result of fetching a step.

    Attributes:
        directory: directory of the step.
        bytes: size of all files, including those of an earlier attempt.
        num_checksums: number of compared checksums.
        errors: one line for each corrupt item. A corrupt step is deleted.
    """

    directory: Path
    bytes: int
    num_checksums: int
    errors: list[str]


def fetch_checkpoint(checkpoint: str, output: Path, *, weights_only: bool, threads: int, show: bool) -> FetchResult:
    """Copies a step and the config, tokenizer and metrics of its run. Resumes an interrupted copy.

    Args:
        checkpoint: `WORKDIR`, `WORKDIR@STEP` or `WORKDIR@best`, as for `choose_step`; a directory or a URL.
        output: destination workdir.
        weights_only: skip the optimizer state and the metrics.
        threads: number of files to copy in parallel.
        show: show progress on a terminal.

    Raises:
        InputError: the checkpoint is missing or cannot be read, or `output` already contains a step of this number.
    """
    workdir, chosen = resolve_checkpoint(checkpoint)
    step = chosen.step
    source = f'{workdir}/{CHECKPOINTS_DIR}/{step}'
    folder = output.resolve() / CHECKPOINTS_DIR
    finished = folder / str(step)
    # A copy without the optimizer state must not resume a complete copy, or vice versa.
    unfinished = folder / PARTIAL_DIR / f'{step}{"-weights" if weights_only else ""}'
    if finished.exists():
        raise InputError(f'{finished}: checkpoint already exists; choose another --output')
    files = list_tree(source, unfinished)
    if weights_only:
        files = [file for file in files if file.path.relative_to(unfinished).parts[0] != OPTIMIZER]
    # The checksums file is rewritten below without the optimizer, so its size does not show that it is complete.
    rewritten = unfinished / ITEM / JSON_FILE
    if weights_only:
        rewritten.unlink(missing_ok=True)
    # A run that resumes from the step appends to the metrics.
    sibling_files = (CONFIG, *MODEL_FILES, *(() if weights_only else (METRICS,)))
    files += [file for name in sibling_files for file in _sibling_file(workdir, name, output.resolve())]
    total = sum(file.bytes for file in files)
    missing = [file for file in files if not file.is_complete]
    num_bytes_present = total - sum(file.bytes for file in missing)
    # The progress bar is not thread-safe.
    lock = threading.Lock()
    with progress_bar('fetch', total=total, initial=num_bytes_present, unit=BYTES, show=show) as bar:

        def on_bytes(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        fetch_tree(missing, threads=threads, on_alarm=logger.warning, on_bytes=on_bytes)
    if weights_only:
        drop_optimizer_checksums(unfinished)
    found, num_checksums = corrupt_arrays(unfinished)
    if found:
        shutil.rmtree(unfinished)
        return FetchResult(
            finished, total, num_checksums, [line.replace(str(unfinished), display_path(source)) for line in found]
        )
    unfinished.rename(finished)
    return FetchResult(finished, total, num_checksums, [])


def find_local_step(checkpoint: str, *, cache: str = CACHE) -> epath.Path:
    """Returns the directory of a step like `find_step`. Fetches the parameters into the cache if they are in a bucket.

    Raises:
        InputError: the checkpoint is missing, cannot be read or is corrupt.
    """
    if not is_url(checkpoint):
        return find_step(checkpoint)
    workdir, chosen = resolve_checkpoint(checkpoint)
    step = chosen.step
    output = cache_directory(workdir, cache, kind='weights')
    local_step = output / CHECKPOINTS_DIR / str(step)
    if local_step.is_dir() and not _is_copy(local_step, f'{workdir}/{CHECKPOINTS_DIR}/{step}'):
        # The copy belongs to another run in the same location, or to this run before a rollback.
        shutil.rmtree(output)
    if not local_step.is_dir():
        logger.info(f'fetching {display_path(workdir)}@{step} to {output}')
        fetched = fetch_checkpoint(f'{workdir}@{step}', output, weights_only=True, threads=THREADS, show=True)
        if fetched.errors:
            raise InputError(f'{fetched.errors[0]}; choose another step')
    return find_step(f'{output}@{step}')


def _is_copy(local_step: Path, source: str) -> bool:
    """Returns True if the checksums of the local copy match those of the source."""
    try:
        there = parse_json(read_bytes(f'{source}/{ITEM}/{JSON_FILE}', limit=MAX_TEXT_BYTES))
        here = parse_json((local_step / ITEM / JSON_FILE).read_bytes())
    except (StorageError, OSError, ValueError):
        return False
    if not isinstance(there, dict):
        return False
    return bool(here == {name: sums for name, sums in there.items() if name != OPTIMIZER})


def _sibling_file(workdir: str, name: str, output: Path) -> list[RemoteFile]:
    if (output / name).exists():
        return []
    try:
        stat(f'{workdir}/{name}')
    except StorageError:
        # An import has no run config. Code that needs one reports the missing file.
        return []
    return list_tree(f'{workdir}/{name}', output)
