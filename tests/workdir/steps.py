"""Provides directories with the layout of Orbax checkpoints and fake content."""

from __future__ import annotations

import os
from pathlib import Path

NAMES = ('_CHECKPOINT_METADATA', 'params/_METADATA', 'params/d/0a1b', 'params/d/ff', 'progress/metadata')


def write_step(workdir: Path, step: int, attempt: str = '') -> Path:
    """Writes a checkpoint and renames it atomically, as Orbax does."""
    folder = workdir / 'checkpoints' / str(step)
    unfinished = folder.with_name(f'{step}.orbax-checkpoint-tmp')
    for number, name in enumerate(NAMES):
        path = unfinished / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f'{step} {attempt} {name} '.encode() * (number * 500))
    os.rename(unfinished, folder)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of all files below a directory by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}
