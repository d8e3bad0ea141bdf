"""Recognizes models in the formats of Transformers, GGUF and nanochat."""

from __future__ import annotations

import re
from pathlib import Path

from maxlm.errors import InputError
from maxlm.storage.filesystem import is_url
from maxlm.workdir.files import CONFIG
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR

HUGGING_FACE, GGUF, NANOCHAT = 'Hugging Face', 'GGUF', 'nanochat'
_GGUF_SUFFIX = '.gguf'
_NANOCHAT_MODEL = re.compile(r'model_\d{1,9}\.pt')


def model_format(path: str) -> str:
    """Returns the format of a local model: HUGGING_FACE, GGUF or NANOCHAT; '' for workdirs and everything else.

    Args:
        path: a directory, a .gguf file, or a model_NNNNNN.pt of nanochat.
    """
    directory = Path(path).expanduser()
    if is_url(path) or (directory / CHECKPOINTS_DIR).is_dir():
        return ''
    if directory.is_file():
        if directory.suffix == _GGUF_SUFFIX:
            return GGUF
        return NANOCHAT if _NANOCHAT_MODEL.fullmatch(directory.name) else ''
    if (directory / CONFIG).is_file():
        return HUGGING_FACE if any(directory.glob('*.safetensors')) else ''
    if any(directory.glob(f'*{_GGUF_SUFFIX}')):
        return GGUF
    return NANOCHAT if any(_NANOCHAT_MODEL.fullmatch(file.name) for file in directory.glob('model_*.pt')) else ''


def refuse_other_formats(checkpoint: str, key: str) -> None:
    """Raises InputError if the value of an option `key` is not a checkpoint of maxlm, but a model to import."""
    if found := HUGGING_FACE if checkpoint.startswith('hf:') else model_format(checkpoint):
        raise InputError(
            f'{key}={checkpoint}: contains a model in the format of {found}; import it with '
            f'`maxlm hf import --input={checkpoint} --output=WORKDIR` and use the workdir'
        )
