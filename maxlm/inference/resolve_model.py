"""Resolves a model argument: a checkpoint, or a model of Transformers, GGUF or nanochat."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from maxlm.errors import InputError
from maxlm.huggingface.gguf.import_gguf import find_gguf, import_gguf
from maxlm.huggingface.import_model import Imported, import_model
from maxlm.huggingface.nanochat.import_checkpoint import find_checkpoint, import_checkpoint
from maxlm.huggingface.tensors.hub import HUB, download_model
from maxlm.log import logger
from maxlm.storage.filesystem import is_url
from maxlm.workdir.files import TOKENIZER
from maxlm.workdir.model_directory import GGUF, NANOCHAT, model_format
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, split_name


@contextlib.contextmanager
def resolved_checkpoint(checkpoint: str) -> Iterator[str]:
    """Yields a checkpoint for `load_model`.

    A model in one of these formats, or `hf:NAME[@REVISION]` of the Hugging Face Hub, is imported into a temporary
    workdir, which is deleted on exit. Other arguments are already checkpoints.

    Raises:
        InputError: the model does not exist.
    """
    if model_format(checkpoint) or checkpoint.startswith(HUB):
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
    yield checkpoint


def _import(checkpoint: str, workdir: str) -> Imported:
    if checkpoint.startswith(HUB):
        return import_model(str(download_model(checkpoint.removeprefix(HUB))), workdir, show=True)
    file = find_gguf(checkpoint) if model_format(checkpoint) == GGUF else None
    if file is not None:
        return import_gguf(file, workdir, tokenizer='', show=True)
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
