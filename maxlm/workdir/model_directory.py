"""Recognizes directories with a model in the format of Transformers."""

from __future__ import annotations

from pathlib import Path

from maxlm.storage.filesystem import is_url
from maxlm.workdir.files import CONFIG
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR


def is_model_directory(path: str) -> bool:
    """Returns True if a local directory contains weights in the format of Transformers, and no checkpoints of a run."""
    directory = Path(path).expanduser()
    return (
        not is_url(path)
        and (directory / CONFIG).is_file()
        and not (directory / CHECKPOINTS_DIR).is_dir()
        and any(directory.glob('*.safetensors'))
    )
