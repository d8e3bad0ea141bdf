"""Exports only the adapters of a checkpoint in PEFT's format, for the exported model that the run started from.

For each projection PEFT stores lora_A [rank, in] and lora_B [out, rank], and adds (alpha / rank) · lora_B · lora_A to
its weight, in all architectures. If the architecture has queries, keys and values in one weight, their adapters are
combined into one whose rank is the sum of theirs. It stacks the lora_As, and places each lora_B in its own rows and
columns.

Shapes: I inputs, O outputs of a weight of Transformers, R rank of its adapter, r rank of an adapter of maxlm.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxlm.checkpoint.conversion.merge_lora import open_parameters
from maxlm.checkpoint.conversion.quantized import quantized_arrays
from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.params import params_item
from maxlm.checkpoint.streaming import ParamsReader, StreamedArray
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.families import is_of_experts
from maxlm.errors import InputError
from maxlm.huggingface.architectures.architecture import GPT2
from maxlm.huggingface.architectures.reward_models import check_language_model
from maxlm.huggingface.config_conversion import choose_architecture
from maxlm.huggingface.state_dict import Tensor, tensors
from maxlm.huggingface.tensors.safetensors_io import SINGLE, TensorEntry, entry_bytes, write_tensors
from maxlm.log import progress_bar
from maxlm.model.blocks import is_stacked
from maxlm.model.layers.lora import LORA_A, LORA_B, adapter_of, adapter_scale
from maxlm.model.layers.weight_only_quantization import CODES, weights_of
from maxlm.storage.atomic import check_new, check_space, new_directory
from maxlm.workdir.files import CONFIG, read_config

# File names of PEFT.
ADAPTER_CONFIG = 'adapter_config.json'
ADAPTER_TENSORS = 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'
_DTYPE = 'float32'


class ExportedAdapter(NamedTuple):
    """Summary of an export. `targets` are the modules of Transformers that have adapters."""

    directory: Path
    class_name: str
    parameters: int
    targets: list[str]


def export_adapter(checkpoint: str, output: str, *, base: str, architecture: str, show: bool) -> ExportedAdapter:
    """Writes adapter_config.json and adapter_model.safetensors, in float32.

    Args:
        checkpoint: path of a run with adapters, as accepted by `find_local_step`.
        output: path of the new directory.
        base: base model to name in adapter_config.json. If it is empty, the frozen parameters are compared with
            `train.init_from`, whose export is the base model.
        architecture: a model_type, or `auto`.
        show: whether to show progress.

    Raises:
        InputError: the model has no adapters or adapters of experts, the run also trained other parameters, or its
            base differs from `train.init_from`; no architecture expresses the model; the checkpoint cannot be read, or
            the output cannot be written. No files remain.
    """
    directory = check_new('--output', output)
    step_directory = find_local_step(checkpoint)
    source = Path(step_directory.parent.parent)
    config = read_config(source)
    model = config.model
    check_language_model(model, 'an export of adapters')
    if not model.lora_rank:
        raise InputError(
            f'--checkpoint={checkpoint}: model.lora_rank=0 in {source / CONFIG} (no adapters); use a run with adapters'
        )
    found = [path for path in model.projections if is_of_experts(f'.{path}') and adapter_of(model, path)]
    if found:
        raise InputError(
            f'--checkpoint={checkpoint}: the run has adapters of {", ".join(found)}, and PEFT stores no '
            'adapters of single experts; export the merged model with `maxlm hf export`'
        )
    row = choose_architecture(model, architecture)
    reader = ParamsReader(step_directory, params_item(step_directory), may_be_quantized=weights_of(model) is not None)
    # Checks the adapters of the step.
    open_parameters(step_directory, model)
    _check_base(config, reader, base)
    adapters = _target_adapters(tensors(row.model_type, model), reader, is_conv1d=row is GPT2)
    entries = [entry for adapter in adapters for entry in adapter.entries]
    parameters = sum(math.prod(entry.shape) for entry in entries)
    size = sum(entry_bytes(entry, _DTYPE) for entry in entries)
    check_space('--output', directory, size)
    settings = _settings(model, adapters, base, is_straight=row is GPT2)
    with (
        new_directory('--output', directory) as partial,
        progress_bar('export', total=len(entries), unit='tensor', show=show) as bar,
    ):
        (partial / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + '\n', encoding='utf-8')
        write_tensors(partial, entries, dtype=_DTYPE, max_shard_size=size, on_written=lambda name: bar.update())
        (partial / SINGLE).rename(partial / ADAPTER_TENSORS)
    return ExportedAdapter(directory, row.class_name, parameters, settings['target_modules'])


class _TargetAdapter(NamedTuple):
    """The adapter of one weight: its target module, its rank and its two tensors."""

    target: str
    rank: int
    entries: tuple[TensorEntry, TensorEntry]


def _target_adapters(rows: Sequence[Tensor], reader: ParamsReader, *, is_conv1d: bool) -> list[_TargetAdapter]:
    """Returns the adapters of all weights. With `is_conv1d`, weights are [in, out] instead of [out, in]."""
    weights = [row for row in rows if row.layer is not None and row.sources[0].endswith('.kernel')]
    last_names = Counter(tensor.name.split('.')[-2] for tensor in weights if tensor.layer == 0)
    orders: dict[tuple[str, ...], np.ndarray] = {}
    adapters = []
    for tensor in weights:
        modules = [source.removesuffix('.kernel') for source in tensor.sources]
        adapted = [module for module in modules if f'{module}.{LORA_A}' in reader.shapes]
        if not adapted:
            continue
        _, *in_shape, r = reader.shapes[f'{adapted[0]}.{LORA_A}']
        sizes = [math.prod(shape[len(in_shape) :]) for shape in tensor.source_shapes]
        if tensor.sources not in orders:
            orders[tensor.sources] = _output_order(tensor, len(in_shape), is_conv1d=is_conv1d)
        stops = np.cumsum(sizes)
        outputs = dict(zip(modules, map(slice, stops - sizes, stops), strict=True))
        outputs = {module: outputs[module] for module in adapted}
        make_a, make_b = _makers(reader, tensor.layer, outputs, orders[tensor.sources])
        rank, name = r * len(adapted), tensor.name.removesuffix('.weight')
        entries = (
            TensorEntry(f'{_PREFIX}{name}.lora_A.weight', (rank, math.prod(in_shape)), make_a),
            TensorEntry(f'{_PREFIX}{name}.lora_B.weight', (sum(sizes), rank), make_b),
        )
        *_, parent, last = name.split('.')
        adapters.append(_TargetAdapter(last if last_names[last] == 1 else f'{parent}.{last}', rank, entries))
    return adapters


def _makers(
    reader: ParamsReader, layer: int | None, outputs: Mapping[str, slice], order_O: np.ndarray
) -> tuple[Callable[[], np.ndarray], Callable[[], np.ndarray]]:
    """Returns functions that create lora_A [R, I] and lora_B [O, R] of a weight.

    Args:
        reader: parameters of the checkpoint.
        layer: layer of the weight.
        outputs: the modules with adapters in the weight, and the slices of their concatenated outputs.
        order_O: index of each output of the weight among the concatenated outputs.
    """

    def make_a() -> np.ndarray:
        lora_as = [reader.read(f'{module}.{LORA_A}', layer) for module in outputs]
        return np.concatenate([lora_a.reshape(-1, lora_a.shape[-1]).T for lora_a in lora_as])

    def make_b() -> np.ndarray:
        blocks = []
        for module, rows in outputs.items():
            lora_b = reader.read(f'{module}.{LORA_B}', layer)
            block_Or = np.zeros((len(order_O), lora_b.shape[0]), np.float32)
            block_Or[rows] = lora_b.reshape(lora_b.shape[0], -1).T
            blocks.append(block_Or)
        return np.concatenate(blocks, axis=1)[order_O]

    return make_a, make_b


def _output_order(tensor: Tensor, num_in: int, *, is_conv1d: bool) -> np.ndarray:
    """Returns, for each output of a weight, its index among the outputs of its kernels, concatenated.

    The indices are passed through the weight's own layout, so the layout is defined in a single place.
    """
    numbers, start = [], 0
    for shape in tensor.source_shapes:
        out_shape = shape[num_in:]
        size = math.prod(out_shape)
        row = np.arange(start, start + size, dtype=np.int32).reshape(out_shape)
        numbers.append(np.broadcast_to(row, shape))
        start += size
    weight = tensor.to_hf(numbers)
    return np.array(weight[0] if is_conv1d else weight[:, 0])


def _settings(model: ModelConfig, parts: Sequence[_TargetAdapter], base: str, *, is_straight: bool) -> dict[str, Any]:
    """Returns the content of adapter_config.json, with the names of PEFT's `LoraConfig`."""
    ranks = {part.target: part.rank for part in parts}
    fused = {target: rank for target, rank in ranks.items() if rank != model.lora_rank}
    return {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base or None,
        'inference_mode': True,
        'r': model.lora_rank,
        'lora_alpha': model.lora_alpha,
        'rank_pattern': fused,
        # PEFT multiplies by alpha / rank.
        'alpha_pattern': {target: adapter_scale(model) * rank for target, rank in fused.items()},
        'target_modules': sorted(ranks),
        'fan_in_fan_out': is_straight,
        'lora_dropout': 0.0,
        'bias': 'none',
        'use_rslora': False,
        'init_lora_weights': True,
    }


def _check_base(config: Config, reader: ParamsReader, base: str) -> None:
    """Raises InputError unless the model without its adapters is available as a base model."""
    if config.optimizer.trainable_params:
        raise InputError(
            f'optimizer.trainable_params={config.optimizer.trainable_params}: the run trained more than its adapters, '
            'so the adapters are not the complete model; merge them with `maxlm hf export`'
        )
    if base:
        return
    advice = 'set --base, or export the merged model with `maxlm hf export`'
    name = config.train.init_from
    if not name:
        raise InputError(f"train.init_from='': the run did not start from a base model that PEFT can load; {advice}")
    started = f'train.init_from={name}: the base model of the run'
    weights = weights_of(config.model)
    try:
        directory = find_local_step(name)
        other = ParamsReader(directory, params_item(directory), may_be_quantized=weights is not None)
        arrays = _arrays(other)
        if weights is not None and arrays.keys().isdisjoint(path for path in reader.shapes if path.endswith(CODES)):
            # The run quantized the kernels of its base.
            arrays = quantized_arrays(other, config.model, weights, str(directory))
    except InputError as error:
        raise InputError(f'{started} cannot be read ({error}); {advice}') from None
    if any(path.endswith((LORA_A, LORA_B)) for path in arrays):
        raise InputError(f'{started} has adapters, so its export is not the base of these adapters; {advice}')
    found = {path: array for path, array in _arrays(reader).items() if not path.endswith((LORA_A, LORA_B))}
    # Compare shapes first, because that does not read the tensors. Codes precede scales, which are computed with them.
    paths = sorted(found)
    differing = [path for path in paths if path not in arrays or arrays[path].shape != found[path].shape]
    for path in differing or paths:
        if differing or not _same_values(found[path], arrays[path]):
            raise InputError(f'{started} and the run differ in {path}; {advice}')


def _arrays(reader: ParamsReader) -> dict[str, StreamedArray]:
    return {
        path: StreamedArray(shape, partial(reader.read, path), is_stacked(path), reader.dtypes[path])
        for path, shape in reader.shapes.items()
    }


def _same_values(array: StreamedArray, other: StreamedArray) -> bool:
    layers = range(array.shape[0]) if array.is_stacked and other.is_stacked else (None,)
    # A moving average of constant parameters may differ in the last digits.
    return all(
        np.allclose(array.read(layer).astype(np.float32), other.read(layer).astype(np.float32), rtol=1e-5, atol=1e-8)
        for layer in layers
    )
