"""Lists the checkpoints of a workdir or bucket with sizes and losses, and chooses one, without reading arrays.

`WORKDIR` is its newest step, `WORKDIR@best` the step with the lowest validation loss, and `WORKDIR@STEP` a step by its
number. All commands, config keys and functions use this rule. If the newest step is not the best one, a line names the
used step and the reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import NamedTuple

from maxlm.checkpoint.drop_optimizer import OPTIMIZER
from maxlm.checkpoint.item_metadata import JSON_FILE
from maxlm.checkpoint.restore import VALIDATION_LOSS
from maxlm.checkpoint.retention import Losses, best_step
from maxlm.errors import InputError
from maxlm.formatting import format_loss
from maxlm.log import logger
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path, is_url, list_directory, read_bytes, walk
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES
from maxlm.workdir.step_dirs import BEST, CHECKPOINTS_DIR, COMMIT_MARKER, DAMAGED, DAMAGED_MARKER, split_name

# The level of the line. The API shows warnings even if the program does not configure logging.
LEVEL = logging.WARNING


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
        checkpoint: the chosen step.
    """

    workdir: str
    checkpoint: CheckpointInfo


def choose_step(
    reference: str, workdir: str, step_name: str, losses: Losses, *, verb: str = 'using', level: int = LEVEL
) -> int:
    """Returns the step of a workdir: the newest one, the best one or the one with a number.

    Args:
        reference: checkpoint as given by the user, for error messages.
        workdir: its workdir as given by the user, for messages.
        step_name: second result of `split_name`: '' = the newest step, `best`, or a number.
        losses: validation losses of the existing checkpoints.
        verb: what the caller does with the step, for the log line.
        level: level of the log line. Processes other than the first only log warnings.

    Raises:
        InputError: there is no such step.
    """
    if not losses:
        raise InputError(f'{reference}: no checkpoint in {workdir}/{CHECKPOINTS_DIR}; choose a workdir of maxlm train')
    newest, best = max(losses), best_step(losses)
    if step_name not in ('', BEST):
        steps = {str(step): step for step in losses}
        if step_name not in steps:
            raise InputError(f'{reference}: step {step_name!r} does not exist; {_available(losses)}')
        return steps[step_name]
    if step_name == BEST and best is None:
        raise InputError(f'{reference}: no step was saved with a validation loss (eval.interval); {_available(losses)}')
    # A line that no handler shows would count as logged.
    is_shown = level >= LEVEL or logger.handlers
    if best not in (None, newest) and is_shown:
        assert best is not None
        lowest, last = (f'step {step}{_loss_text(losses[step])}' for step in (best, newest))
        if step_name == BEST:
            line = f'{verb} {lowest}, which has the lowest validation loss; the newest is {last}'
        else:
            line = f'{verb} {last}, the newest; the lowest validation loss is that of {lowest}: {workdir}@{BEST}'
        _log_once(level, f'{workdir}: {line}')
    return newest if best is None or not step_name else best


def resolve_checkpoint(checkpoint: str) -> CheckpointRef:
    """Chooses one step of `WORKDIR`, `WORKDIR@STEP` or `WORKDIR@best`, a local directory or a URL; see `choose_step`.

    Raises:
        InputError: the workdir has no checkpoint, or not the requested one.
    """
    workdir, step_name = split_name(checkpoint)
    steps = list_checkpoints(workdir)
    chosen = choose_step(display_path(checkpoint), display_path(workdir), step_name, losses_of(steps))
    return CheckpointRef(workdir, next(one for one in steps if one.step == chosen))


def resolve_checkpoints(checkpoint: str) -> tuple[str, list[CheckpointInfo]]:
    """Returns the workdir of a reference with the requested step, or with all steps if none is requested.

    Raises:
        InputError: the workdir has no checkpoint, or not the requested one.
    """
    workdir, step_name = split_name(checkpoint)
    if not step_name and (steps := list_checkpoints(workdir)):
        return workdir, steps
    chosen = resolve_checkpoint(checkpoint)
    return chosen.workdir, [chosen.checkpoint]


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


def _available(losses: Losses) -> str:
    return f'available steps: {", ".join(map(str, sorted(losses)))}'


def _loss_text(loss: float | None) -> str:
    return ' (loss unknown)' if loss is None else f' ({format_loss(loss)})'


@functools.cache
def _log_once(level: int, line: str) -> None:
    # A command may resolve the same checkpoint several times.
    logger.log(level, line)
