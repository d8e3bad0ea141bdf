"""Imports a Transformers directory as a workdir with one checkpoint, one layer at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from maxlm.checkpoint.streaming import StreamedArray, num_reads, write_step
from maxlm.config.resolve import config_for_model
from maxlm.config.schema import Config
from maxlm.config.serialization import to_json
from maxlm.data.tokenizer.model_files import read_json_object
from maxlm.errors import InputError
from maxlm.huggingface.architectures.reward_models import class_name_of
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.config_conversion import check_supported, from_config
from maxlm.huggingface.config_fields import Fields
from maxlm.huggingface.export_peft import ADAPTER_CONFIG
from maxlm.huggingface.original_config import kept_config
from maxlm.huggingface.state_dict import BUFFERS, HEADS, PREFIXES, Tensor, parameter_shapes, tensors
from maxlm.huggingface.tensors.dequantize import open_tensors
from maxlm.huggingface.tensors.mtp import MTP_ARCHITECTURES, count_modules, shared_copies
from maxlm.huggingface.tensors.safetensors_io import TensorFiles
from maxlm.huggingface.tokenizer_files import files_for_import
from maxlm.log import logger, progress_bar
from maxlm.storage.atomic import check_new, check_space, new_directory
from maxlm.storage.check_directory import check_entries
from maxlm.workdir.files import CONFIG, EXPORT_FILES, HF_CONFIG, TOKENIZER

_WEIGHTS = ('.pt', '.pth', '.bin', '.ckpt', '.gguf', '.safetensors')
_SHOWN_FILES = 5


class Imported(NamedTuple):
    """Summary of an import. `boundaries` describes the tokens at the beginning and the end of a text."""

    workdir: Path
    class_name: str
    parameters: int
    boundaries: dict[str, str]


def import_model(source: str, output: str, *, show: bool) -> Imported:
    """Creates a workdir with the model as step 0, in float32. `train.init_from` can name it.

    Args:
        source: directory with config.json and safetensors.
        output: path of the new workdir.
        show: whether to show progress.

    Raises:
        InputError: the model is not supported or has an adapter of PEFT, its files are corrupt or inconsistent, or the
            output cannot be written. No files remain.
    """
    workdir = check_new('--output', output)
    directory = Path(source).expanduser()
    if not directory.is_dir():
        raise InputError(
            f'--input={source}: no such directory; a model of the Hugging Face Hub is hf:ORG/NAME, or download it with '
            '`hf download ORG/NAME --local-dir DIR`'
        )
    if (directory / ADAPTER_CONFIG).exists():
        raise InputError(
            f'{directory / ADAPTER_CONFIG}: Transformers adds this PEFT adapter to the model, but the import cannot; '
            "merge it with PEFT's merge_and_unload, or remove the file to import the model without the adapter"
        )
    path = directory / CONFIG
    _check_exists(path)
    check_entries(directory, (CONFIG, TOKENIZER, *EXPORT_FILES))
    values = read_json_object(path, must_exist=True)
    check_supported(Fields(values, str(path)), ARCHITECTURES)
    files = open_tensors(directory, values.get('quantization_config') or {}, str(path))
    model = from_config(values, str(path))
    architecture = values['model_type']
    if architecture in MTP_ARCHITECTURES:
        model = dataclasses.replace(model, mtp_depth=count_modules(files.shapes, model.num_layers))
        configured = values.get('num_nextn_predict_layers', 0)
        if configured != model.mtp_depth:
            logger.info(
                f'{path}: num_nextn_predict_layers={configured!r:.100}, but the files have {model.mtp_depth} modules '
                'of multi-token prediction, which are imported'
            )
    rows = tensors(architecture, model)
    names = match_tensors(files, rows, architecture, shared_copies(model), str(directory))
    text = files_for_import(directory)
    if text.remark:
        logger.info(text.remark)
    config = config_for_model(dataclasses.asdict(model), str(path))
    original = json.dumps(kept_config(values, directory), indent=2).encode()
    arrays = streamed_arrays(files, rows, names)
    parameters = write_workdir(workdir, config, {HF_CONFIG: original, **text.files}, arrays, show=show)
    return Imported(workdir, class_name_of(ARCHITECTURES[architecture], model), parameters, text.described)


def write_workdir(
    workdir: Path, config: Config, files: Mapping[str, bytes], arrays: Mapping[str, StreamedArray], *, show: bool
) -> int:
    """Writes a workdir with one checkpoint, step 0.

    Args:
        workdir: a new path.
        config: resolved config of the model.
        files: content of other files by name.
        arrays: the parameters by dotted path.
        show: whether to show progress.

    Returns:
        The number of parameters.

    Raises:
        InputError: the workdir cannot be written. No files remain.
    """
    parameters = sum(math.prod(array.shape) for array in arrays.values())
    check_space('--output', workdir, 4 * parameters)
    with (
        new_directory('--output', workdir) as partial,
        progress_bar('import', total=num_reads(arrays), unit='array', show=show) as bar,
    ):
        (partial / CONFIG).write_text(to_json(config), encoding='utf-8')
        for name, content in files.items():
            (partial / name).write_bytes(content)
        write_step(partial, 0, arrays, on_read=bar.update)
    return parameters


def _check_exists(path: Path) -> None:
    """Raises InputError unless a directory has a config.json. The message names files that it has instead."""
    if os.path.lexists(path):
        return
    names = sorted(entry.name for entry in path.parent.iterdir())
    # Files of weights first.
    names.sort(key=lambda name: not name.endswith(_WEIGHTS))
    found = ', '.join(names[:_SHOWN_FILES]) + (f' and {len(names) - _SHOWN_FILES} more' * (len(names) > _SHOWN_FILES))
    raise InputError(
        f'{path}: No such file; found {found or "an empty directory"}; give a directory in the format of Transformers, '
        'or one with model_NNNNNN.pt and meta_NNNNNN.json of nanochat'
    )


def match_tensors(
    files: TensorFiles, rows: Sequence[Tensor], architecture: str, copies: Mapping[str, str], source: str
) -> dict[str, str]:
    """Maps the name of each tensor of the architecture to its name in the files, which may lack the prefix.

    Args:
        files: the tensors of the files.
        rows: the tensors of the architecture.
        architecture: a model_type.
        copies: copy → original of the names of tensors that the files may contain twice. A copy that differs is not
            used, which is logged.
        source: name of the directory in error messages.

    Raises:
        InputError: a tensor is missing, unexpected or duplicated, or has the wrong shape or an unsupported dtype.
    """
    expected = {tensor.name: tensor for tensor in rows}
    prefix, head = PREFIXES[architecture], HEADS.get(architecture, 'lm_head.weight')
    embedding = next(tensor.name for tensor in rows if tensor.sources == ('embedding',))
    matched: dict[str, str] = {}
    tied = []
    copied: dict[str, str] = {}
    for name, shape in files.shapes.items():
        # A version of Transformers used this name for the head of all architectures.
        full = head if name == 'lm_head.weight' else name
        full = full if full in expected or full == head or full.startswith(prefix) else prefix + full
        if full in matched:
            raise InputError(
                f'{files.path(name)}: tensor {name} is a duplicate of {matched[full]}; remove one of the two'
            )
        if full in expected:
            matched[full] = name
        elif full == head:
            tied.append(name)
        elif full in copies:
            copied[name] = copies[full]
        elif not any(re.fullmatch(pattern, full) for pattern in BUFFERS[architecture]):
            class_name = ARCHITECTURES[architecture].class_name
            raise InputError(
                f'{files.path(name)}: tensor {name} {shape} does not belong to {class_name} as defined by config.json; '
                'use the config.json of these weights'
            )
    for full, tensor in expected.items():
        if full not in matched:
            missing = len(expected) - len(matched)
            raise InputError(
                f'{source}: tensor {full} {tensor.shape} is missing ({missing} in total); download it again'
            )
        shape = files.shapes[matched[full]]
        if shape != tensor.shape:
            raise InputError(
                f'{files.path(matched[full])}: tensor {matched[full]} has shape {shape}, but config.json requires '
                f'{tensor.shape}; use the config.json of these weights'
            )
    files.check_dtypes([*matched.values(), *tied, *copied])
    for name in tied:
        if not files.equal(name, matched[embedding]):
            raise InputError(
                f'{files.path(name)}: tensor {name} differs from the embedding, but tie_word_embeddings is true; set '
                'tie_word_embeddings to false in config.json to use the tensor'
            )
    for name, original in copied.items():
        if not files.equal(name, matched[original]):
            logger.warning(
                f'{files.path(name)}: tensor {name} differs from {original}; the module of multi-token prediction is '
                f'imported with {original}'
            )
    return matched


class _Part(NamedTuple):
    """Source of a parameter of one layer or expert: a tensor of the files, and the index among its sources."""

    tensor: Tensor
    source: int


class _Reader(Protocol):
    """Reads the tensors of files by name."""

    def path(self, name: str) -> Path: ...
    def read(self, name: str) -> np.ndarray: ...


def streamed_arrays(files: _Reader, rows: Sequence[Tensor], names: Mapping[str, str]) -> dict[str, StreamedArray]:
    """Returns the parameters of a model by dotted path, which are read while they are written.

    Args:
        files: the tensors of the files.
        rows: the tensors of the model.
        names: name of each tensor in the files.
    """
    shapes = parameter_shapes(rows)
    parts: dict[tuple[str, int | None], list[_Part]] = {}
    for tensor in rows:
        for index, path in enumerate(tensor.sources):
            parts.setdefault((path, tensor.layer), []).append(_Part(tensor, index))

    def part(tensor: Tensor, index: int) -> np.ndarray:
        name = names[tensor.name]
        values = files.read(name)
        if not np.isfinite(values).all():
            raise InputError(f'{files.path(name)}: tensor {name} has values that are not finite; download it again')
        return tensor.from_hf(values)[index]

    def array(path: str) -> StreamedArray:
        def read(layer: int | None) -> np.ndarray:
            found = parts[path, layer]
            if found[0].tensor.expert is None:
                return part(*found[0])
            # The tensors of the experts are in their order.
            return np.stack([part(*expert) for expert in found])

        return StreamedArray(shapes[path], read, is_stacked=(path, None) not in parts)

    return {path: array(path) for path in shapes}
