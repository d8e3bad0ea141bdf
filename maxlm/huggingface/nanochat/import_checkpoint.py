"""Imports a checkpoint of nanochat as a workdir with one checkpoint, one layer at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from maxlm.data.tokenizer.model_files import read_json_object
from maxlm.data.tokenizer.text_boundaries import describe_boundaries
from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE, Tokenizer, make_tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.import_model import Imported, streamed_arrays, write_workdir
from maxlm.huggingface.nanochat.chat_template import TEMPLATE, TOKENS
from maxlm.huggingface.nanochat.model_versions import EMBEDDING, file_tensors, padded_rows, read_config
from maxlm.huggingface.nanochat.tokenizer_pickle import FILE as TOKENIZER_PICKLE
from maxlm.huggingface.nanochat.tokenizer_pickle import read_tokenizer
from maxlm.huggingface.nanochat.torch_reader import TorchTensors
from maxlm.huggingface.state_dict import Tensor
from maxlm.log import logger
from maxlm.storage.atomic import check_new
from maxlm.storage.check_directory import check_entries
from maxlm.workdir.files import CHAT_TEMPLATE, CONFIG, TEXT_BOUNDARIES, TOKENIZER

_MODEL = re.compile(r'model_(\d{1,9})\.pt')


class Checkpoint(NamedTuple):
    """The files of one step."""

    model: Path
    meta: Path


def find_checkpoint(source: str) -> Checkpoint | None:
    """Returns the files of a checkpoint of nanochat, or None if there is none.

    Args:
        source: a directory, which means its newest step, or the path of one model_NNNNNN.pt.

    Raises:
        InputError: the path is another file, or the meta file is missing.
    """
    path = Path(source).expanduser()
    directory = path if path.is_dir() else path.parent
    if path.is_dir():
        names = [] if (path / CONFIG).exists() else [entry.name for entry in path.iterdir()]
        steps = [(int(match[1]), name) for name in names if (match := _MODEL.fullmatch(name))]
        if not steps:
            return None
        path = path / max(steps)[1]
    if not path.is_file():
        return None
    if not _MODEL.fullmatch(path.name):
        raise InputError(f'--input={source}: is a file; give a directory, or model_NNNNNN.pt of nanochat')
    meta = directory / path.name.replace('model', 'meta').replace('.pt', '.json')
    if not meta.is_file():
        raise InputError(f'{meta}: no such file; copy it from the directory in which nanochat saved {path.name}')
    return Checkpoint(path, meta)


def import_checkpoint(checkpoint: Checkpoint, output: str, *, tokenizer: str, show: bool) -> Imported:
    """Creates a workdir with the model as step 0, in float32. `train.init_from` can name it.

    Args:
        checkpoint: the files.
        output: path of the new workdir.
        tokenizer: path of a tokenizer.pkl or tokenizer.json, or of its directory; `ids:N` for no tokenizer; '' = the
            directory of the checkpoint, or the one in which nanochat saves it.
        show: whether to show progress.

    Raises:
        InputError: the model is not supported, its files are corrupt or inconsistent, or the output cannot be written.
            No files remain.
    """
    workdir = check_new('--output', output)
    directory = checkpoint.model.parent
    check_entries(directory, (checkpoint.meta.name,))
    check_entries(directory, (checkpoint.model.name,), limit=None)
    meta = read_json_object(checkpoint.meta, must_exist=True)
    files = TorchTensors(checkpoint.model)
    embedding = files.shapes.get(EMBEDDING, ())
    dtype = 'bfloat16' if embedding and files.dtypes[EMBEDDING].name == 'bfloat16' else 'float32'
    config = read_config(meta, files.shapes, dtype, str(checkpoint.meta))
    vocab_size = config.model.vocab_size
    # Files of the first weeks have no padding.
    rows = file_tensors(config.model, vocab_size if embedding[:1] == (vocab_size,) else padded_rows(vocab_size))
    _check_tensors(files, rows, checkpoint)
    found = _tokenizer(tokenizer, directory, vocab_size)
    written = _tokenizer_files(found) if found else {}
    arrays = streamed_arrays(files, rows, {tensor.name: tensor.name for tensor in rows})
    parameters = write_workdir(workdir, config, written, arrays, show=show)
    boundaries = describe_boundaries(found.boundary_names) if found else {}
    return Imported(workdir, f'nanochat ({checkpoint.model.name})', parameters, boundaries)


def _check_tensors(files: TorchTensors, rows: list[Tensor], checkpoint: Checkpoint) -> None:
    """Raises InputError unless the file has exactly the tensors of the model."""
    expected = {tensor.name: tensor.shape for tensor in rows}
    for name in [*expected, *files.shapes]:
        found = files.shapes.get(name)
        if found != expected.get(name):
            raise InputError(
                f'{checkpoint.model}: tensor {name[:100]} has shape {found or "none (missing)"}, but '
                f'{expected.get(name, "none (not in the model)")} according to {checkpoint.meta.name}; use the meta '
                'file of the same step'
            )


def _tokenizer(spec: str, directory: Path, vocab_size: int) -> Tokenizer | None:
    """Returns the tokenizer of an import; None if it has none.

    Raises:
        InputError: the tokenizer does not exist, is damaged, or is of another vocabulary.
    """
    if spec.startswith('ids:'):
        tokenizer, source = make_tokenizer(spec, []), f'--tokenizer={spec}'
    else:
        path = _tokenizer_file(spec, directory)
        if path is None:
            logger.info(
                f'{directory} has no {TOKENIZER_PICKLE}, which generate and evaluate need; import again with '
                '--tokenizer=FILE, or with --tokenizer=ids:N for token ids as text'
            )
            return None
        logger.info(f'tokenizer: {path}')
        tokenizer, source = read_tokenizer(path), str(path)
    if tokenizer.vocab_size != vocab_size:
        raise InputError(
            f'{source}: has {tokenizer.vocab_size:,} ids, but the model has vocab_size={vocab_size}; use the tokenizer '
            'of this model'
        )
    return tokenizer


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the files of a workdir for a tokenizer, with the chat template of nanochat if it has its tokens."""
    special = {token.content for token in tokenizer.special_tokens.values()}
    texts = {TOKENIZER: tokenizer.to_json(), TEXT_BOUNDARIES: tokenizer.boundaries.to_json()}
    texts |= {CHAT_TEMPLATE: TEMPLATE} if special.issuperset(TOKENS) else {}
    return {name: text.encode() for name, text in texts.items()}


def _tokenizer_file(spec: str, directory: Path) -> Path | None:
    """Returns the path of a tokenizer. nanochat saves it in `tokenizer/` beside the directories of all checkpoints."""
    given = Path(spec).expanduser() if spec else None
    if given and given.is_file():
        return given
    folders = [given] if given else [directory, directory.resolve().parent.parent / 'tokenizer']
    for folder in folders:
        for name in (TOKENIZER_PICKLE, TOKENIZER_FILE):
            if (folder / name).is_file():
                return folder / name
    if given:
        found = (
            f'has neither {TOKENIZER_PICKLE} nor {TOKENIZER_FILE}' if given.is_dir() else 'no such file or directory'
        )
        raise InputError(f'--tokenizer={spec}: {found}; give a file, its directory or ids:N')
    return None
