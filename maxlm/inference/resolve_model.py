"""Resolves a model argument: a checkpoint or a Transformers directory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from maxlm.errors import InputError
from maxlm.huggingface.import_model import import_model
from maxlm.log import logger
from maxlm.storage.filesystem import is_url
from maxlm.workdir.model_directory import is_model_directory
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, split_name


@contextlib.contextmanager
def resolved_checkpoint(checkpoint: str) -> Iterator[str]:
    """Yields a checkpoint for `load_model`.

    A Transformers directory is imported into a temporary workdir, which is deleted on exit. Other arguments are already
    checkpoints.

    Raises:
        InputError: the model does not exist.
    """
    if is_model_directory(checkpoint):
        with tempfile.TemporaryDirectory(prefix='maxlm-serve-') as directory:
            workdir = Path(directory) / 'imported'
            logger.info(f'importing {checkpoint} into {workdir}; run `maxlm hf import` once to skip this at each start')
            try:
                imported = import_model(checkpoint, str(workdir), show=True)
            except InputError as error:
                raise InputError(str(error).replace('--input=', '--checkpoint=')) from error
            logger.info(f'{checkpoint}: {imported.class_name} with {imported.parameters:,} parameters')
            yield str(workdir)
        return
    yield checkpoint


def default_model_name(checkpoint: str) -> str:
    """Returns the default name of a served model: the name of its directory."""
    path = Path(split_name(checkpoint)[0])
    if path.parent.name == CHECKPOINTS_DIR:
        path = path.parent.parent
    return (path if is_url(checkpoint) else path.resolve()).name or 'model'
