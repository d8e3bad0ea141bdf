"""Lists the checkpoints of a workdir or bucket with sizes and losses, without reading arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from maxlm.checkpoint.drop_optimizer import OPTIMIZER
from maxlm.checkpoint.item_metadata import JSON_FILE
from maxlm.checkpoint.restore import VALIDATION_LOSS
from maxlm.checkpoint.retention import Losses, best_step
from maxlm.errors import InputError
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path, is_url, list_directory, read_bytes, walk
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES
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
    workdir, step_name = split_name(checkpoint)
    steps = list_checkpoints(workdir)
    chosen = select_step(display_path(checkpoint), display_path(workdir), step_name, losses_of(steps))
    return CheckpointRef(workdir, [one for one in steps if one.step == chosen or not step_name])


def select_step(reference: str, workdir: str, step_name: str, losses: Losses) -> int:
    """Returns the step of a workdir with the number `step_name`, the `best` one, or the newest one if it is ''.

    Args:
        reference: checkpoint as given by the user, for error messages.
        workdir: its workdir, for error messages.
        step_name: second result of `split_name`.
        losses: existing checkpoints.

    Raises:
        InputError: there is no such step.
    """
    if not losses:
        raise InputError(f'{reference}: no checkpoint in {workdir}/{CHECKPOINTS_DIR}; choose a workdir of maxlm train')
    if not step_name:
        return max(losses)
    steps = {str(step): step for step in sorted(losses)}
    chosen = best_step(losses) if step_name == BEST else steps.get(step_name)
    if chosen is None:
        reason = f'step {step_name!r} does not exist'
        if step_name == BEST:
            reason = 'no step was saved with a validation loss (eval.interval)'
        raise InputError(f'{reference}: {reason}; available steps: {", ".join(steps)}')
    return chosen


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


def losses_of(steps: Iterable[CheckpointInfo]) -> Losses:
    """Returns the validation losses by step."""
    return {one.step: one.validation_loss for one in steps}


def damaged_steps(workdir: str) -> list[str]:
    """Returns the names of the steps that were set aside as corrupt."""
    names = _entries(workdir)
    moved = list_directory(f'{workdir}/{CHECKPOINTS_DIR}/{DAMAGED}') if DAMAGED in names else []
    marked = [name for name in names if is_url(workdir) and name.isdigit() and _is_set_aside(workdir, name)]
    return [entry.name for entry in moved] + sorted(marked, key=int)


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
