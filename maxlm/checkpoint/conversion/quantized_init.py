"""Warm start of a model with quantized kernels and adapters (Dettmers et al. 2023, "QLoRA").

A checkpoint with float32 kernels is quantized while it is read, one layer at a time. A checkpoint with kernels of the
same format is read as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from maxlm.checkpoint.conversion.quantized import kernel_shape, quantized_arrays
from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.init_from import InitCheckpoint, open_init_checkpoint, read_run_config
from maxlm.checkpoint.item_metadata import item_metadata, named_leaves
from maxlm.checkpoint.params import params_item
from maxlm.checkpoint.streaming import ParamsReader
from maxlm.config.schema import Config, ModelConfig
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.model.layers.weight_only_quantization import CODES, KERNEL, SCALES, quantized_kernels, weights_of
from maxlm.training.state import Params
from maxlm.workdir.step_dirs import to_path


def open_initial(step: epath.Path, config: Config, abstract: Params, *, tokenizer: Path | None) -> InitCheckpoint:
    """Compares a step with the parameters of a run like `open_init_checkpoint`.

    If the run has quantized kernels and the step does not, `InitCheckpoint.read` quantizes them.

    Args:
        step, config, abstract, tokenizer: see `open_init_checkpoint`.

    Raises:
        InputError: the step cannot be read, belongs to another model, or has kernels of another format.
    """
    model = config.model
    weights = weights_of(model)
    if weights is None:
        return open_init_checkpoint(step, config, abstract, tokenizer=tokenizer)
    path = to_path(step) / params_item(step)
    if any(name.endswith(f'.{CODES}') for name in named_leaves(item_metadata(path))):
        _check_same_format(step, model)
        return open_init_checkpoint(step, config, abstract, tokenizer=tokenizer)
    origin = open_init_checkpoint(step, config, _with_kernels(abstract, model), tokenizer=tokenizer)
    if origin.upcycled is not None:
        raise InputError(
            f'{path}: model.weight_quantization={weights.kind} with a dense checkpoint for a model with experts: new '
            'experts must be trained; set model.weight_quantization=float'
        )
    stored = _with_codes(origin.stored, abstract)
    return origin._replace(stored=stored, load=partial(_read_quantized, step, model, stored))


def _check_same_format(step: epath.Path, model: ModelConfig) -> None:
    before = read_run_config(step)
    if before is None or weights_of(before.model) == weights_of(model):
        return
    kind, group = before.model.weight_quantization, before.model.quantization_group_size
    raise InputError(
        f'{step}: the kernels are stored with model.weight_quantization={kind} and '
        f'model.quantization_group_size={group}, but the run has {model.weight_quantization} and '
        f'{model.quantization_group_size}; set both keys like the checkpoint, or set train.init_from to the checkpoint '
        'before quantization'
    )


def _read_quantized(step: epath.Path, model: ModelConfig, stored: Params) -> dict[str, jax.Array]:
    """Returns the arrays of a step by dotted path, quantized and sharded like `stored`.

    Peak host memory is one stack of codes over all layers plus one float32 layer.
    """
    weights = weights_of(model)
    assert weights is not None
    logger.info(f'quantizing the kernels of {step} to {weights.kind}')
    # A step in a bucket is fetched, because its kernels are read one layer at a time.
    local = find_local_step(f'{step.parent.parent}@{step.name}')
    arrays = quantized_arrays(ParamsReader(Path(local), params_item(local)), model, weights, str(step))
    leaves = named_leaves(stored)
    found: dict[str, jax.Array] = {}
    # Sorted, because the scales of a kernel are computed with its codes and follow them.
    for name in sorted(leaves):
        array = arrays[name]
        layers = range(array.shape[0]) if array.is_stacked else None
        values = array.read(None) if layers is None else np.stack([array.read(layer) for layer in layers])
        found[name] = jax.make_array_from_callback(values.shape, leaves[name].sharding, values.__getitem__)
    return found


def _with_kernels(tree: Mapping[str, Any], model: ModelConfig, module: str = '') -> dict[str, Any]:
    """Returns the tree with the shape of a float32 kernel in place of its codes and scales."""
    found = {
        name: _with_kernels(value, model, f'{module}{name}.') if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if name not in (CODES, SCALES)
    }
    if CODES in tree:
        path = f'{module}{KERNEL}'
        shape = kernel_shape(tree[CODES].shape, path, quantized_kernels(model)[path], model.weight_quantization)
        found[KERNEL] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return found


def _with_codes(tree: Mapping[str, Any], abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree with the codes and scales of `abstract` in place of their kernels."""
    found = {
        name: _with_codes(value, abstract[name]) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if not (name == KERNEL and CODES in abstract)
    }
    return found | {name: abstract[name] for name in (CODES, SCALES) if name in abstract}
