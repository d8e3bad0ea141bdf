"""Quantizes a float32 checkpoint into a new workdir or into memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.checkpoint.conversion.quantized import quantized_arrays
from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.item_metadata import named_leaves
from maxlm.checkpoint.params import params_item, without_training_modules
from maxlm.checkpoint.streaming import ParamsReader, StreamedArray, num_reads, write_step
from maxlm.config.schema import Config
from maxlm.config.sections.model import NO_FP8
from maxlm.config.sections.quantization import QUANTIZATION_GROUPS
from maxlm.config.serialization import to_json
from maxlm.errors import InputError
from maxlm.log import progress_bar
from maxlm.model.layers.weight_only_quantization import Weights
from maxlm.storage.atomic import check_new, check_space, new_directory
from maxlm.workdir.files import CONFIG, MODEL_FILES, read_config


class Quantized(NamedTuple):
    """Result of a quantization.

    Attributes:
        workdir: the new workdir.
        step: step of the checkpoint.
        memory_before: bytes of the source parameters in memory.
        memory_after: bytes of the quantized parameters in memory.
        disk_before: bytes of the source parameters on disk.
        disk_after: bytes of the quantized parameters on disk.
    """

    workdir: Path
    step: int
    memory_before: int
    memory_after: int
    disk_before: int
    disk_after: int


def parse_weights(kind: str, group: int | None = None) -> Weights:
    """Returns the quantization settings of a weight type.

    Args:
        kind: weight type: int8, int4 or fp8.
        group: group size; None = the default of the weight type; 0 = one scale for all inputs.

    Raises:
        InputError: the weight type is unknown, or the group size is negative.
    """
    if kind not in QUANTIZATION_GROUPS:
        raise InputError(f'{kind!r} is not a weight format; use one of {", ".join(QUANTIZATION_GROUPS)}')
    if group is not None and group < 0:
        raise InputError(f'--group={group}: must be at least 0 (0 = one scale for all inputs)')
    return Weights(kind, QUANTIZATION_GROUPS[kind] if group is None else group)


def quantized_config(config: Config, weights: Weights, source: str) -> Config:
    """Returns the config of a run with its model quantized.

    Args:
        config: config of a run with float32 weights.
        weights: quantization settings of the kernels.
        source: name of the checkpoint in error messages.

    Raises:
        InputError: the model is already quantized or has adapters.
    """
    model = config.model
    if model.weight_quantization != 'float':
        raise InputError(
            f'{source}: the weights are already quantized to {model.weight_quantization}; pass the original checkpoint'
        )
    if model.lora_rank:
        raise InputError(
            f'{source}: the model has adapters (model.lora_rank={model.lora_rank}); merge them first with '
            f'maxlm checkpoints merge'
        )
    # Quantized kernels are multiplied in the compute dtype; they cannot be quantized again for the matmul.
    model = dataclasses.replace(
        without_training_modules(model),
        weight_quantization=weights.kind,
        quantization_group_size=weights.group,
        **NO_FP8,
    )
    return dataclasses.replace(config, model=model)


def quantize_checkpoint(checkpoint: str, output: str, weights: Weights, *, show: bool) -> Quantized:
    """Creates a workdir whose only step contains the quantized model of a checkpoint, one layer at a time.

    Copies the step number, the tokenizer, the chat template and the config, in which it changes
    model.weight_quantization, model.quantization_group_size and model.matmul_precision.

    Args:
        checkpoint: checkpoint, in the syntax of `find_local_step`.
        output: workdir to create.
        weights: quantization settings of the block kernels. Embedding, head, norms and biases stay float32.
        show: show a progress bar.

    Raises:
        InputError: the model is already quantized or has adapters, its kernels cannot be quantized this way, the
            checkpoint cannot be read, or the output cannot be written. No partial output remains.
    """
    workdir = check_new('--output', output)
    step_directory = find_local_step(checkpoint)
    source = Path(step_directory.parent.parent)
    config = read_config(source)
    quantized = quantized_config(config, weights, f'--checkpoint={checkpoint}')
    reader = ParamsReader(step_directory, params_item(step_directory))
    arrays = quantized_arrays(reader, config.model, weights, str(step_directory))
    size = sum(array.size * array.dtype.itemsize for array in arrays.values())
    check_space('--output', workdir, size)
    step = int(step_directory.name)
    with (
        new_directory('--output', workdir) as partial,
        progress_bar('quantize', total=num_reads(arrays), unit='array', show=show) as bar,
    ):
        (partial / CONFIG).write_text(to_json(quantized), encoding='utf-8')
        for name in MODEL_FILES:
            if (source / name).is_file():
                (partial / name).write_bytes((source / name).read_bytes())
        write_step(partial, step, arrays, on_read=bar.update)
    before = sum(math.prod(shape) * reader.dtypes[path].itemsize for path, shape in reader.shapes.items())
    output_step = Path(find_local_step(f'{workdir}@{step}'))
    disk_bytes = (_disk_bytes(Path(step_directory) / params_item(step_directory)), _disk_bytes(output_step / 'params'))
    return Quantized(workdir, step, before, size, *disk_bytes)


def read_quantized(step_directory: Any, config: Config, weights: Weights, abstract: Any) -> Any:
    """Reads float32 parameters of a step and quantizes them while loading.

    Peak host memory beyond the result is one stack of codes over all layers plus one float32 layer.

    Args:
        step_directory: directory returned by `find_local_step`.
        config: config of the run, with float32 weights.
        weights: quantization settings of the block kernels.
        abstract: shapes, dtypes and shardings of the quantized parameters.

    Returns:
        Quantized parameters, with the structure and shardings of `abstract`.

    Raises:
        InputError: the parameters belong to another model, cannot be read, or cannot be quantized this way.
    """
    reader = ParamsReader(step_directory, params_item(step_directory))
    arrays = quantized_arrays(reader, config.model, weights, str(step_directory))
    expected = named_leaves(abstract)
    _check_shapes(arrays, expected, str(step_directory))
    placed = {}
    # Sorted, because the scales of a kernel are computed with its codes and follow them.
    for path in sorted(arrays):
        array = arrays[path]
        values = (
            np.stack([array.read(layer) for layer in range(array.shape[0])]) if array.is_stacked else array.read(None)
        )
        placed[path] = jax.device_put(values, expected[path].sharding)
    return jax.tree.unflatten(jax.tree.structure(abstract), [placed[path] for path in expected])


def _check_shapes(arrays: Mapping[str, StreamedArray], expected: Mapping[str, Any], source: str) -> None:
    for path in sorted(arrays.keys() | expected.keys()):
        found = arrays[path].shape if path in arrays else 'missing'
        expected_shape = tuple(expected[path].shape) if path in expected else 'none'
        if found != expected_shape:
            raise InputError(
                f'{source}: parameter {path}: found {found}, but {CONFIG} expects {expected_shape}; use '
                f'the {CONFIG} of the same model'
            )


def _disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())
