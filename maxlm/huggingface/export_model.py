"""Exports a checkpoint to a directory that Transformers loads, one layer at a time."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxlm.checkpoint.conversion.merge_lora import open_parameters
from maxlm.checkpoint.fetch import find_local_step
from maxlm.errors import InputError
from maxlm.huggingface.architectures.dense import QWEN2
from maxlm.huggingface.architectures.reward_models import class_name_of, padded_for_scores
from maxlm.huggingface.config_conversion import AUTO, choose_architecture
from maxlm.huggingface.model_card import NAME as CARD
from maxlm.huggingface.model_card import model_card
from maxlm.huggingface.original_config import (
    base_model,
    choose_dtype,
    export_config,
    original_architecture,
    read_original,
)
from maxlm.huggingface.state_dict import Tensor, parameter_shapes, tensors
from maxlm.huggingface.tensors.mtp import MTP_ARCHITECTURES, shared_copies
from maxlm.huggingface.tensors.safetensors_io import TensorEntry, entry_bytes, write_tensors
from maxlm.huggingface.tokenizer_files import files_for_export
from maxlm.log import logger, progress_bar
from maxlm.storage.atomic import check_new, check_space, new_directory
from maxlm.workdir.files import CONFIG, TOKENIZER, TOKENIZER_CONFIG, read_config

MAX_SHARD_BYTES = 10**9


class Exported(NamedTuple):
    """Summary of an export."""

    directory: Path
    class_name: str
    parameters: int
    bytes: int
    dtype: str


def export_model(
    checkpoint: str,
    output: str,
    *,
    architecture: str,
    dtype: str,
    max_shard_size: int,
    show: bool,
    workdir: Path | None = None,
    name: str = '',
) -> Exported:
    """Writes a checkpoint as config.json, safetensors, tokenizer and model card.

    Adapters are merged, and quantized kernels are dequantized. Only one parameter of one layer, or the embedding, is in
    memory at a time. The same checkpoint gives the same bytes.

    Args:
        checkpoint: path as accepted by `find_local_step`.
        output: path of the new directory.
        architecture: a model_type, or `auto`, which prefers that of the imported model.
        dtype: type of the tensors: float32, bfloat16 or float16, or `auto`; see `choose_dtype`.
        max_shard_size: maximum bytes of tensors in one file.
        show: whether to show progress.
        workdir: directory of config, tokenizer and metrics; None = that of the checkpoint.
        name: name of the model in the model card; '' = the name of the output.

    Raises:
        InputError: no architecture expresses the model, the checkpoint cannot be read, a value is not finite or exceeds
            the range of `dtype`, or the output cannot be written. No files remain.
    """
    directory = check_new('--output', output)
    step_directory = find_local_step(checkpoint)
    workdir = workdir or step_directory.parent.parent
    config = read_config(workdir)
    original = read_original(workdir)
    dtype = choose_dtype(dtype, original)
    if architecture == AUTO:
        architecture = original_architecture(original, config.model)
    row = choose_architecture(config.model, architecture)
    rows = tensors(row.model_type, config.model)
    with_mtp = row.model_type in MTP_ARCHITECTURES
    reader = open_parameters(step_directory, config.model, with_mtp=with_mtp)
    shapes = parameter_shapes(rows)
    check_shapes(reader.shapes, shapes, step_directory, workdir / CONFIG)
    text = files_for_export(workdir, config.model)
    if row is QWEN2 and TOKENIZER in text.files and not (workdir / TOKENIZER_CONFIG).is_file():
        logger.warning(
            'AutoTokenizer of Transformers splits text for Qwen2 models by rules of its own; load this tokenizer with '
            'transformers.PreTrainedTokenizerFast'
        )
    step = int(step_directory.name)
    settings = export_config(original, config.model, row, ids=text.ids, dtype=dtype, is_trained=step > 0)
    settings = padded_for_scores(config.model, settings)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    if with_mtp:
        by_name = {tensor.name: tensor for tensor in rows}
        rows += [by_name[name]._replace(name=copy) for copy, name in shared_copies(config.model).items()]
    card = model_card(
        name or directory.name,
        workdir=workdir,
        step=step,
        config=config,
        architecture=row,
        dtype=dtype,
        parameters=parameters,
        base=base_model(original),
    )
    # Consecutive tensors of experts have the same source.
    read = functools.lru_cache(maxsize=1)(reader.read)
    entries = [TensorEntry(tensor.name, tensor.shape, _tensor_maker(read, tensor)) for tensor in rows]
    size = sum(entry_bytes(entry, dtype) for entry in entries)
    check_space('--output', directory, size)
    with (
        new_directory('--output', directory) as partial,
        progress_bar('export', total=len(entries), unit='tensor', show=show) as bar,
    ):
        (partial / CONFIG).write_text(json.dumps(settings, indent=2) + '\n', encoding='utf-8')
        (partial / CARD).write_text(card, encoding='utf-8')
        for name, content in text.model_files.items():
            (partial / name).write_bytes(content)
        write_tensors(
            partial, entries, dtype=dtype, max_shard_size=max_shard_size, on_written=lambda name: bar.update()
        )
    return Exported(directory, class_name_of(row, config.model), parameters, size, dtype)


def _tensor_maker(read: Callable[[str, int | None], np.ndarray], tensor: Tensor) -> Callable[[], np.ndarray]:
    return lambda: tensor.to_hf([read(path, tensor.layer) for path in tensor.sources])


def check_shapes(
    stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], step_directory: Path, config: Path
) -> None:
    """Raises InputError unless the parameters of a step match its config."""
    for path in sorted(stored.keys() | expected.keys()):
        if stored.get(path) != expected.get(path):
            raise InputError(
                f'{step_directory}: parameter {path} has shape {stored.get(path, "none (missing)")}, but '
                f'{expected.get(path, "none (not in the model)")} according to {config}; use the config.json of this '
                'checkpoint'
            )
