"""Lists the checkpoints of a workdir or bucket with sizes and losses, without reading arrays."""

from __future__ import annotations

from typing import NamedTuple

from maxlm.checkpoint.drop_optimizer import OPTIMIZER
from maxlm.checkpoint.item_metadata import JSON_FILE
from maxlm.checkpoint.restore import VALIDATION_LOSS
from maxlm.config.schema import Config
from maxlm.config.serialization import from_json
from maxlm.errors import InputError
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path, is_url, list_directory, read_bytes, walk
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES
from maxlm.training.retention import SavedStep, best_step
from maxlm.workdir.files import CONFIG
from maxlm.workdir.step_dirs import BEST, CHECKPOINTS_DIR, COMMIT_MARKER, DAMAGED, DAMAGED_MARKER, split_name


class CheckpointInfo(NamedTuple):
    """Complete step.

    Attributes:
        step: number of the step.
        bytes: size of all files.
        optimizer_bytes: size of the optimizer state; 0 if the step has none.
        validation_loss: validation loss of the saved state, or None if unknown.
    """

    step: int
    bytes: int
    optimizer_bytes: int
    validation_loss: float | None


class CheckpointRef(NamedTuple):
    """Resolved checkpoint reference.

    Attributes:
        workdir: workdir as given by the user.
        steps: the requested step, or all steps if none was requested.
    """

    workdir: str
    steps: list[CheckpointInfo]


def resolve_checkpoint(checkpoint: str) -> CheckpointRef:
    """Resolves `WORKDIR`, `WORKDIR@STEP` or `WORKDIR@best`, a local directory or a URL.

    Raises:
        InputError: the workdir has no checkpoint, or not the requested one.
    """
    workdir, wanted = split_name(checkpoint)
    steps = list_checkpoints(workdir)
    if not steps:
        raise InputError(
            f'{display_path(checkpoint)}: no checkpoint in {display_path(workdir)}/{CHECKPOINTS_DIR}; choose a workdir '
            'of maxlm.train'
        )
    if not wanted:
        return CheckpointRef(workdir, steps)
    best = best_step(SavedStep(one.step, one.validation_loss) for one in steps)
    chosen = [one for one in steps if (one.step == best if wanted == BEST else str(one.step) == wanted)]
    if not chosen:
        known = ', '.join(str(one.step) for one in steps)
        reason = 'no step was saved with a validation loss' if wanted == BEST else f'step {wanted!r} does not exist'
        raise InputError(f'{display_path(checkpoint)}: {reason}; available steps: {known}')
    return CheckpointRef(workdir, chosen)


def list_checkpoints(workdir: str) -> list[CheckpointInfo]:
    """Returns the complete steps of a workdir, oldest first. A missing workdir has no steps.

    Raises:
        StorageError: the workdir cannot be listed.
    """
    sizes: dict[int, dict[str, int]] = {}
    for name in _entries(workdir):
        if name.isdigit():
            files = {entry.name: entry.size for entry in walk(f'{workdir}/{CHECKPOINTS_DIR}/{name}')}
            if files and (COMMIT_MARKER in files or not is_url(workdir)):
                sizes[int(name)] = files
    return [
        CheckpointInfo(
            step,
            sum(files.values()),
            sum(size for name, size in files.items() if name.startswith(f'{OPTIMIZER}/')),
            _loss(workdir, step),
        )
        for step, files in sorted(sizes.items())
    ]


def damaged_steps(workdir: str) -> list[str]:
    """Returns the names of the steps that were set aside as corrupt."""
    names = _entries(workdir)
    moved = list_directory(f'{workdir}/{CHECKPOINTS_DIR}/{DAMAGED}') if DAMAGED in names else []
    marked = [name for name in names if is_url(workdir) and name.isdigit() and _is_set_aside(workdir, name)]
    return [entry.name for entry in moved] + sorted(marked, key=int)


def run_config(workdir: str) -> Config:
    """Returns the config of a run, local or in a bucket.

    Raises:
        InputError: the config is missing or cannot be read.
    """
    path = f'{workdir}/{CONFIG}'
    try:
        return from_json(read_bytes(path, limit=MAX_TEXT_BYTES).decode())
    except ValueError as error:
        raise InputError(
            f'{display_path(path)}: not a valid config of this version of maxlm ({error}); '
            'use the version that wrote it'
        ) from error


def _entries(workdir: str) -> list[str]:
    try:
        return [entry.name for entry in list_directory(f'{workdir}/{CHECKPOINTS_DIR}') if entry.is_directory]
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise


def _is_set_aside(workdir: str, name: str) -> bool:
    files = {entry.name for entry in list_directory(f'{workdir}/{CHECKPOINTS_DIR}/{name}')}
    return DAMAGED_MARKER in files and COMMIT_MARKER not in files


def _loss(workdir: str, step: int) -> float | None:
    try:
        content = read_bytes(f'{workdir}/{CHECKPOINTS_DIR}/{step}/progress/{JSON_FILE}', limit=MAX_TEXT_BYTES)
        loss = parse_json(content)[VALIDATION_LOSS]
    except (StorageError, ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, float) else None
