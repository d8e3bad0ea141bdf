"""Deletes the optimizer state of a step on a disk. The step can still be evaluated, sampled and exported."""

from __future__ import annotations

import json
from pathlib import Path

from maxlm.checkpoint.checksums import ITEM, read_checksums
from maxlm.checkpoint.item_metadata import JSON_FILE
from maxlm.storage.atomic import atomic_write
from maxlm.storage.filesystem import walk
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_text
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, StepDirectory, to_path

OPTIMIZER = 'optimizer'


def drop_optimizer(workdir: Path, step: int) -> int:
    """Deletes the optimizer state of a step and returns the freed bytes. Another call resumes an interrupted one.

    The step is changed by one atomic operation: its checksums are replaced by those without the optimizer state, so
    that `is_params_only` holds. Without checksums, the rename of the item does the same. The files are deleted last.

    Raises:
        InputError: the checksums are corrupt, or the files cannot be changed.
    """
    path = workdir / CHECKPOINTS_DIR / str(step)
    item = path / OPTIMIZER
    size = sum(entry.size for entry in walk(str(item))) if item.is_dir() else 0
    drop_optimizer_checksums(path)
    StepDirectory(workdir).delete_item(step, OPTIMIZER)
    return size


def drop_optimizer_checksums(step_directory: Path) -> None:
    """Removes the optimizer state from the checksums of a step, if it has checksums.

    Raises:
        InputError: the checksums are corrupt or cannot be written.
    """
    stored = read_checksums(to_path(step_directory))
    if stored is None or OPTIMIZER not in stored:
        return
    path = step_directory / ITEM / JSON_FILE
    content = parse_json(read_text(path))
    atomic_write(path, json.dumps({name: content[name] for name in content if name != OPTIMIZER}))
