"""Imports a GGUF file as a workdir with one checkpoint, one tensor at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxlm.checkpoint.streaming import StreamedArray
from maxlm.config.schema import ModelConfig
from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE
from maxlm.errors import InputError
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.gguf.architectures import FACTORS_LLAMA3, FACTORS_LONGROPE, GGUF_ARCHITECTURES
from maxlm.huggingface.gguf.header import SUFFIX, GgufFiles
from maxlm.huggingface.gguf.library import load_gguf
from maxlm.huggingface.gguf.model_metadata import read_model
from maxlm.huggingface.gguf.read_tokenizer import tokenizer_files
from maxlm.huggingface.gguf.tensors import GgufTensor, gguf_tensors
from maxlm.huggingface.import_model import Imported, write_workdir
from maxlm.huggingface.state_dict import parameter_shapes, tensors
from maxlm.huggingface.tokenizer_files import ImportedFiles, files_for_import
from maxlm.log import logger
from maxlm.storage.atomic import check_new

_FACTORS = (FACTORS_LLAMA3, *FACTORS_LONGROPE)


def find_gguf(source: str) -> Path | None:
    """Returns the path of a GGUF file, or None for everything else.

    A directory without a config.json means its only GGUF file, or the first part of its only model.

    Raises:
        InputError: the directory contains several models.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or (path / 'config.json').exists():
        return None
    files = sorted(file for file in path.glob(f'*{SUFFIX}') if '-of-' not in file.name or '-00001-of-' in file.name)
    if len(files) > 1:
        raise InputError(f'--input={source}: contains {len(files)} models, e.g. {files[0].name}; give one of the files')
    return files[0] if files else None


def import_gguf(path: Path, output: str, *, tokenizer: str, show: bool) -> Imported:
    """Creates a workdir with the model as step 0, dequantized to float32. `train.init_from` can name it.

    Args:
        path: the file, or any part of a split file.
        output: path of the new workdir.
        tokenizer: path of a tokenizer.json or of its directory; '' = the vocabulary of the file.
        show: whether to show progress.

    Raises:
        InputError: the model or its tokenizer is not supported, the file is damaged, or the output cannot be written.
            No files remain.
    """
    workdir = check_new('--output', output)
    files = GgufFiles(path)
    source = str(files.source)
    factors = {name: files.read(name) for name in _FACTORS if name in files.tensors}
    is_float32 = all(tensor.kind.name == 'F32' for tensor in files.tensors.values())
    dtype = 'float32' if is_float32 else 'bfloat16'
    config, architecture = read_model(files.metadata, files.shapes, factors, dtype=dtype, source=source)
    model = config.model
    gguf = load_gguf()
    target = GGUF_ARCHITECTURES[architecture]
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == target.kind)
    hf_tensors = tensors(architecture, model)
    rows = gguf_tensors(hf_tensors, model, target, gguf.get_tensor_name_map(kind, model.num_layers))
    _check_tensors(files, rows)
    text = _text_files(files, tokenizer, model)
    if text.remark:
        logger.info(text.remark)
    arrays = _arrays(files, rows, parameter_shapes(hf_tensors))
    parameters = write_workdir(workdir, config, text.files, arrays, show=show)
    return Imported(workdir, ARCHITECTURES[architecture].class_name, parameters, text.described)


def _check_tensors(files: GgufFiles, rows: Sequence[GgufTensor]) -> None:
    """Raises InputError unless the file has exactly the tensors of the model."""
    expected = {row.name: row.shape for row in rows}
    for name in [*expected, *(name for name in files.shapes if name not in _FACTORS)]:
        found = files.shapes.get(name)
        if found != expected.get(name):
            raise InputError(
                f'{files.source}: tensor {name:.100} has shape {found or "none (missing)"}, but '
                f'{expected.get(name, "none (not in the model)")} according to its metadata; convert the model again'
            )


def _arrays(
    files: GgufFiles, rows: Sequence[GgufTensor], shapes: dict[str, tuple[int, ...]]
) -> dict[str, StreamedArray]:
    """Returns the parameters by dotted path, which are read while they are written."""
    parts = {(path, row.layer): (row, index) for row in rows for index, path in enumerate(row.sources)}

    def array(path: str) -> StreamedArray:
        def read(layer: int | None) -> np.ndarray:
            row, index = parts[path, layer]
            values = files.read(row.name)
            if not np.isfinite(values).all():
                raise InputError(
                    f'{files.path(row.name)}: tensor {row.name} has values that are not finite; download it again'
                )
            return row.invert(values)[index]

        return StreamedArray(shapes[path], read, is_stacked=(path, None) not in parts)

    return {path: array(path) for path in shapes}


def _text_files(files: GgufFiles, tokenizer: str, model: ModelConfig) -> ImportedFiles:
    """Returns the files of the tokenizer, of the file itself or of another directory."""
    if tokenizer:
        path = Path(tokenizer).expanduser()
        directory = path if path.is_dir() else path.parent
        if (path.is_file() and path.name != TOKENIZER_FILE) or not (directory / TOKENIZER_FILE).is_file():
            raise InputError(
                f'--tokenizer={tokenizer}: is no {TOKENIZER_FILE} and no directory that has one; give either'
            )
        return files_for_import(directory)
    with tempfile.TemporaryDirectory(prefix='maxlm-gguf-') as folder:
        for name, content in tokenizer_files(files.metadata, str(files.source)).items():
            (Path(folder) / name).write_text(content, encoding='utf-8', errors='surrogateescape')
        try:
            found = files_for_import(Path(folder))
        except InputError as error:
            raise InputError(str(error).replace(folder, str(files.source))) from error
        return found._replace(remark=found.remark.replace(folder, str(files.source)))
