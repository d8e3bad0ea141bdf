"""Resolves a model argument: a step of a workdir, its best step, or a model of Transformers or nanochat."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from maxlm.checkpoint.listing import losses_of, resolve_checkpoint
from maxlm.checkpoint.retention import best_step
from maxlm.errors import InputError
from maxlm.huggingface.import_model import Imported, import_model
from maxlm.huggingface.nanochat.import_checkpoint import find_checkpoint, import_checkpoint
from maxlm.log import logger
from maxlm.storage.filesystem import display_path, is_url
from maxlm.workdir.files import TOKENIZER
from maxlm.workdir.model_directory import NANOCHAT, model_format
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, split_name


@contextlib.contextmanager
def resolved_checkpoint(checkpoint: str) -> Iterator[str]:
    """Yields a checkpoint for `load_model`.

    For a workdir, this is the step with the lowest validation loss, or the newest step if none has a validation loss.
    A model in the format of Transformers or nanochat is imported into a temporary workdir, which is deleted on exit.

    Raises:
        InputError: the model does not exist.
    """
    if model_format(checkpoint):
        with tempfile.TemporaryDirectory(prefix='maxlm-serve-') as directory:
            workdir = Path(directory) / 'imported'
            logger.info(f'importing {checkpoint} into {workdir}; run `maxlm hf import` once to skip this at each start')
            try:
                imported = _import(checkpoint, str(workdir))
            except InputError as error:
                raise InputError(str(error).replace('--input=', '--checkpoint=')) from error
            logger.info(f'{checkpoint}: {imported.class_name} with {imported.parameters:,} parameters')
            yield str(workdir)
        return
    yield _best_checkpoint(checkpoint)


def _import(checkpoint: str, workdir: str) -> Imported:
    found = find_checkpoint(checkpoint) if model_format(checkpoint) == NANOCHAT else None
    if found is None:
        return import_model(checkpoint, workdir, show=True)
    imported = import_checkpoint(found, workdir, tokenizer='', show=True)
    if not (imported.workdir / TOKENIZER).exists():
        raise InputError(
            f'--input={checkpoint}: the tokenizer is not beside the model; import it with `maxlm hf import '
            f'--input {checkpoint} --tokenizer=FILE --output=WORKDIR` and use the workdir'
        )
    return imported


def default_model_name(checkpoint: str) -> str:
    """Returns the default name of a served model: the name of its directory."""
    path = Path(split_name(checkpoint)[0])
    if path.parent.name == CHECKPOINTS_DIR:
        path = path.parent.parent
    return (path if is_url(checkpoint) else path.resolve()).name or 'model'


def _best_checkpoint(checkpoint: str) -> str:
    workdir, step_name = split_name(checkpoint)
    path = Path(workdir)
    if step_name or (path.name.isdigit() and path.parent.name == CHECKPOINTS_DIR):
        return checkpoint
    steps = resolve_checkpoint(checkpoint).steps
    best = best_step(losses_of(steps))
    if best is None:
        logger.info(
            f'{display_path(workdir)}: no step has a validation loss; serving the newest, step {steps[-1].step}'
        )
        return f'{workdir}@{steps[-1].step}'
    logger.info(
        f'{display_path(workdir)}: serving step {best}, which has the lowest validation loss; @STEP selects another'
    )
    return f'{workdir}@{best}'
