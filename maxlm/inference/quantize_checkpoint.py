"""A quantized model from a checkpoint in float32: as a workdir of its own, or straight into memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.item_metadata import named_leaves
from maxlm.checkpoint.params import params_item
from maxlm.checkpoint.quantized import quantized_arrays
from maxlm.checkpoint.streaming import ParamsReader, StreamedArray, write_step
from maxlm.config.loading import to_json
from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.log import progress_bar
from maxlm.model.layers.weight_only_quantization import DEFAULT_GROUPS, Weights
from maxlm.storage.atomic import check_new, check_space, new_directory
from maxlm.workdir.files import CONFIG, EXPORT_FILES, TOKENIZER, read_config


class Quantized(NamedTuple):
    """Workdir, step, and bytes of the parameters before and after, in memory and on disk."""

    workdir: Path
    step: int
    memory_before: int
    memory_after: int
    disk_before: int
    disk_after: int


def parse_weights(kind: str, group: int | None = None) -> Weights:
    """Returns how to store kernels; `group` defaults to the group size of the kind.

    Raises:
        InputError: there is no such kind, or the group is below 0.
    """
    if kind not in DEFAULT_GROUPS:
        raise InputError(f'{kind!r} is no kind of quantized weights; there are {", ".join(DEFAULT_GROUPS)}')
    if group is not None and group < 0:
        raise InputError(f'--group={group}: must be at least 0 (0 = one scale for all inputs)')
    return Weights(kind, DEFAULT_GROUPS[kind] if group is None else group)


def quantized_config(config: Config, weights: Weights, source: str) -> Config:
    """The config of a run with its model quantized.

    Args:
        config: of a run in float32.
        weights: how its kernels are stored.
        source: what messages call the checkpoint.

    Raises:
        InputError: the model is quantized already, or has adapters.
    """
    model = config.model
    if model.weight_quantization != 'float':
        raise InputError(
            f'{source}: its weights are {model.weight_quantization} already; give the checkpoint that they are from'
        )
    if model.lora_rank:
        raise InputError(
            f'{source}: the model has adapters (model.lora_rank={model.lora_rank}); merge them first by '
            f'maxlm.checkpoints merge'
        )
    # Products are those of the computation's type: the kernels have no other codes but their own.
    model = dataclasses.replace(
        model, weight_quantization=weights.kind, quantization_group_size=weights.group, matmul_precision='default'
    )
    return dataclasses.replace(config, model=model)


def quantize_checkpoint(checkpoint: str, output: str, weights: Weights, *, show: bool) -> Quantized:
    """Makes a workdir with the quantized model of a checkpoint as its only step, a layer at a time.

    It keeps the config of the run but for model.weight_quantization, the tokenizer and the chat template, and the
    step's number.

    Args:
        checkpoint: as `find_local_step` takes it.
        output: the workdir to be made.
        weights: how to store the kernels of the blocks; embedding, head, norms and biases stay in float32.
        show: whether to show progress.

    Raises:
        InputError: the model is quantized already or has adapters, its kernels cannot be stored so, the checkpoint
            cannot be read, or the output cannot be written. Nothing is left behind.
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
    steps = sum(array.shape[0] if array.is_stacked else 1 for array in arrays.values())
    step = int(step_directory.name)
    with (
        new_directory('--output', workdir) as partial,
        progress_bar(total=steps, initial=0, unit='array', show=show) as bar,
    ):
        (partial / CONFIG).write_text(to_json(quantized), encoding='utf-8')
        for name in (TOKENIZER, *EXPORT_FILES):
            if (source / name).is_file():
                (partial / name).write_bytes((source / name).read_bytes())

        def with_progress(array: StreamedArray) -> StreamedArray:
            def read(layer: int | None) -> np.ndarray:
                bar.update()
                return array.read(layer)

            return dataclasses.replace(array, read=read)

        write_step(partial, step, {path: with_progress(array) for path, array in arrays.items()})
    before = sum(math.prod(shape) * reader.dtypes[path].itemsize for path, shape in reader.shapes.items())
    output_step = Path(find_local_step(f'{workdir}@{step}'))
    disk_bytes = (_disk_bytes(Path(step_directory) / params_item(step_directory)), _disk_bytes(output_step / 'params'))
    return Quantized(workdir, step, before, size, *disk_bytes)


def read_quantized(step_directory: Any, config: Config, weights: Weights, abstract: Any) -> Any:
    """The parameters of a step in float32 as those of the quantized model, placed as `abstract` says.

    What is held besides the result is one stack over layers of codes, and one layer in float32.

    Args:
        step_directory: as `find_step` returns it.
        config: of the run, in float32.
        weights: how to store the kernels of the blocks.
        abstract: shapes, types and placements of the parameters of the quantized model.

    Raises:
        InputError: they are those of another model, cannot be read, or cannot be stored so.
    """
    reader = ParamsReader(step_directory, params_item(step_directory))
    arrays = quantized_arrays(reader, config.model, weights, str(step_directory))
    expected = named_leaves(abstract)
    _check_shapes(arrays, expected, str(step_directory))
    placed = {}
    # Sorted: the scales of a kernel come after its codes, with which they are made.
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
                f'{source}: parameter {path} is {found} there and {expected_shape} by its {CONFIG}; the two belong to '
                f'different models'
            )


def _disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())
