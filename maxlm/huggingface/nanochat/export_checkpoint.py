"""Exports a checkpoint as the files of nanochat, one layer at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxlm.checkpoint.conversion.merge_lora import open_parameters
from maxlm.checkpoint.fetch import find_local_step
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.export_model import check_shapes
from maxlm.huggingface.nanochat.model_versions import file_tensors, model_config, padded_rows
from maxlm.huggingface.nanochat.tokenizer_pickle import FILE as TOKENIZER_PICKLE
from maxlm.huggingface.nanochat.tokenizer_pickle import write_tokenizer
from maxlm.huggingface.nanochat.torch_writer import write_torch_file
from maxlm.huggingface.state_dict import Tensor, parameter_shapes
from maxlm.huggingface.tensors.safetensors_io import TensorEntry, entry_bytes
from maxlm.log import logger, progress_bar
from maxlm.storage.atomic import check_new, check_space, new_directory
from maxlm.workdir.files import CONFIG, TOKENIZER, read_config


class ExportedCheckpoint(NamedTuple):
    """Summary of an export.

    Attributes:
        directory: the new directory.
        files: names of its files.
        parameters: number of parameters of the model, without padding.
        bytes: size of the tensors.
    """

    directory: Path
    files: tuple[str, ...]
    parameters: int
    bytes: int


def export_checkpoint(checkpoint: str, output: str, *, dtype: str, show: bool) -> ExportedCheckpoint:
    """Writes a checkpoint as model_NNNNNN.pt, meta_NNNNNN.json and, if possible, tokenizer.pkl.

    Adapters are merged, and quantized kernels are dequantized.

    Args:
        checkpoint: path as accepted by `find_local_step`.
        output: path of the new directory.
        dtype: dtype of the tensors: float32, bfloat16 or float16.
        show: whether to show progress.

    Raises:
        InputError: nanochat cannot express the model, the checkpoint cannot be read, a value is not finite or exceeds
            the range of `dtype`, or the output cannot be written. No files remain.
    """
    directory = check_new('--output', output)
    step_directory = find_local_step(checkpoint)
    workdir = step_directory.parent.parent
    model = read_config(workdir).model
    settings = model_config(model)
    rows = file_tensors(model, padded_rows(model.vocab_size))
    reader = open_parameters(step_directory, model)
    shapes = parameter_shapes(rows)
    check_shapes(reader.shapes, shapes, step_directory, workdir / CONFIG)
    tokenizer = _tokenizer(workdir / TOKENIZER, model.vocab_size)
    entries = [TensorEntry(tensor.name, tensor.shape, _maker(reader.read, tensor)) for tensor in rows]
    size = sum(entry_bytes(entry, dtype) for entry in entries)
    check_space('--output', directory, size)
    step = int(step_directory.name)
    meta = {'step': step, 'model_config': settings}
    model_file, meta_file = f'model_{step:06d}.pt', f'meta_{step:06d}.json'
    with (
        new_directory('--output', directory) as partial,
        progress_bar('export', total=len(entries), unit='tensor', show=show) as bar,
    ):
        write_torch_file(partial / model_file, entries, dtype=dtype, on_written=lambda name: bar.update())
        (partial / meta_file).write_text(json.dumps(meta, indent=2) + '\n', encoding='utf-8')
        if tokenizer:
            (partial / TOKENIZER_PICKLE).write_bytes(tokenizer)
    files = (model_file, meta_file, *([TOKENIZER_PICKLE] if tokenizer else []))
    return ExportedCheckpoint(directory, files, sum(math.prod(shape) for shape in shapes.values()), size)


def _maker(read: Callable[[str, int | None], np.ndarray], tensor: Tensor) -> Callable[[], np.ndarray]:
    return lambda: tensor.to_hf([read(path, tensor.layer) for path in tensor.sources])


def _tokenizer(path: Path, vocab_size: int) -> bytes | None:
    """Returns the content of tokenizer.pkl; None if nanochat cannot use the tokenizer, which is logged."""
    if not path.is_file():
        return None
    tokenizer = Tokenizer.load(path)
    try:
        if tokenizer.vocab_size != vocab_size:
            raise InputError(
                f'the tokenizer has {tokenizer.vocab_size:,} ids and the model {vocab_size:,}, but nanochat requires '
                'equal numbers; write a tokenizer.pkl for the model'
            )
        return write_tokenizer(tokenizer)
    except InputError as error:
        logger.warning(f'{TOKENIZER_PICKLE} is not written: {error}')
        return None
