"""Merges LoRA adapters (Hu et al. 2022, "LoRA") into their kernels: kernel + scale · lora_a · lora_b.

Shapes: L layers. A projection's kernel is [*in, *out], lora_a [*in, rank] and lora_b [rank, *out]. Each has a leading L
axis if layers are stacked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from maxlm.checkpoint.conversion.quantized import DequantizedReader
from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.params import params_item, unused_modules, without_training_modules
from maxlm.checkpoint.streaming import ParamsReader, StreamedArray, num_reads, write_step
from maxlm.config.resolve import config_for_model
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.families import is_of_experts
from maxlm.config.serialization import to_json
from maxlm.errors import InputError
from maxlm.log import progress_bar
from maxlm.model.blocks import is_stacked
from maxlm.model.decoder import Decoder
from maxlm.model.layers.lora import LORA_A, LORA_B, adapter_scale
from maxlm.model.layers.weight_only_quantization import weights_of
from maxlm.storage.atomic import check_new, check_space, new_directory
from maxlm.workdir.files import CONFIG, MODEL_FILES, read_config


class MergeResult(NamedTuple):
    """Workdir of the merged model, and its number of parameters."""

    workdir: Path
    parameters: int


def merge(params: Mapping[str, Any], model: ModelConfig, *, is_expert: bool = False) -> dict[str, Any]:
    """Returns the parameters of the same model without adapters, in float32. Pure, so it can be compiled.

    Args:
        params: nested dict of a model's parameters, with blocks stacked over layers.
        model: config of the trained model, with its `lora_rank` and `lora_alpha`.
        is_expert: the parameters are those of experts, with an additional axis that numbers them.
    """
    if LORA_A in params:

        def added(lora_a: jax.Array, lora_b: jax.Array) -> jax.Array:
            return jnp.tensordot(lora_a, lora_b, axes=1, precision=jax.lax.Precision.HIGHEST)

        add = jax.vmap(jax.vmap(added) if is_expert else added)
        kernel_L = params['kernel'] + adapter_scale(model) * add(params[LORA_A], params[LORA_B])
        return {name: params[name] for name in params if name not in (LORA_A, LORA_B)} | {'kernel': kernel_L}
    return {
        name: merge(value, model, is_expert=is_expert or name == 'experts') if isinstance(value, Mapping) else value
        for name, value in params.items()
    }


def without_adapters(model: ModelConfig) -> ModelConfig:
    """Returns the model config without adapters, modules that only training uses and quantized kernels."""
    plain = ModelConfig()
    return dataclasses.replace(
        without_training_modules(model),
        lora_rank=plain.lora_rank,
        lora_alpha=plain.lora_alpha,
        lora_target_modules=plain.lora_target_modules,
        weight_quantization=plain.weight_quantization,
        quantization_group_size=plain.quantization_group_size,
    )


def adapter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a resolved model's adapters by dotted path, stacked over layers."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))
    flat = {'.'.join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    return {name: tuple(variable.shape) for name, variable in flat.items() if name.endswith((LORA_A, LORA_B))}


class MergedReader:
    """Reads the parameters of one step like `ParamsReader`, with adapters merged into their kernels.

    Reading one layer of a kernel needs memory for the kernel and for its adapter's product, which has the same size.

    Attributes:
        shapes: dotted path → stored shape, without adapters.
    """

    def __init__(self, reader: ParamsReader | DequantizedReader, model: ModelConfig, source: str):
        """Reads the shapes of the step's arrays, but not the arrays.

        Args:
            reader: reader of the step.
            model: config of the run, with or without adapters.
            source: name of the step in error messages.

        Raises:
            InputError: the adapters of the step do not match those of the model.
        """
        expected = adapter_shapes(model) if model.lora_rank else {}
        for path in unused_modules(expected, reader.shapes):
            del expected[path]
        stored = {path: shape for path, shape in reader.shapes.items() if path.endswith((LORA_A, LORA_B))}
        for path in sorted(stored.keys() | expected.keys()):
            if stored.get(path) != expected.get(path):
                raise InputError(
                    f'{source}: parameter {path} is {stored.get(path, "missing")} in the checkpoint but '
                    f'{expected.get(path, "absent")} according to its {CONFIG}; restore the {CONFIG} of this checkpoint'
                )
        if model.lora_rank and not stored:
            raise InputError(
                f'{source}: no parameter has adapters, but model.lora_rank={model.lora_rank} in its {CONFIG}; restore '
                f'the {CONFIG} of this checkpoint'
            )
        self.shapes = {path: shape for path, shape in reader.shapes.items() if path not in stored}
        self._reader, self._adapted_modules = reader, {path.rpartition('.')[0] for path in stored}
        self._scale = np.float32(adapter_scale(model)) if model.lora_rank else np.float32(0)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        """Reads one array or one layer, like `ParamsReader.read`. A kernel with an adapter requires `layer`."""
        values = self._reader.read(path, layer)
        module, _, name = path.rpartition('.')
        if name != 'kernel' or module not in self._adapted_modules:
            return values
        assert layer is not None, path
        lora_a, lora_b = (self._reader.read(f'{module}.{matrix}', layer) for matrix in (LORA_A, LORA_B))
        if is_of_experts(path):
            added: np.ndarray = np.matmul(lora_a * self._scale, lora_b)
        else:
            added = np.tensordot(lora_a * self._scale, lora_b, axes=1)
        added += values
        return added


def open_parameters(step_directory: epath.Path, model: ModelConfig, *, with_mtp: bool = False) -> MergedReader:
    """Opens the parameters of a step as float32 parameters without adapters and quantization.

    Args:
        step_directory: path as returned by `find_step`.
        model: model of its config.
        with_mtp: include modules of multi-token prediction.

    Raises:
        InputError: the parameters cannot be read, or do not match the model.
    """
    item, source = params_item(step_directory), str(step_directory)
    if weights_of(model) is None:
        return MergedReader(ParamsReader(step_directory, item, with_mtp=with_mtp), model, source)
    stored = ParamsReader(step_directory, item, may_be_quantized=True)
    return MergedReader(DequantizedReader(stored, model, source), model, source)


def merge_checkpoint(checkpoint: str, output: str, *, show: bool) -> MergeResult:
    """Creates a workdir whose step 0 contains a checkpoint's model with merged adapters. Processes one layer at a time.

    Quantized kernels are dequantized. The new config contains the model and the run's data.seq_len. The tokenizer and
    chat template are copied.

    Args:
        checkpoint: argument of `find_local_step`.
        output: new workdir.
        show: show progress.

    Raises:
        InputError: the model has no adapters, the checkpoint cannot be read, or the output cannot be written. Partial
            output is deleted.
    """
    workdir = check_new('--output', output)
    step_directory = find_local_step(checkpoint)
    source = Path(step_directory.parent.parent)
    config = read_config(source)
    if not config.model.lora_rank:
        raise InputError(
            f'--checkpoint={checkpoint}: model.lora_rank=0 in {source / CONFIG}, so there are no adapters to merge; '
            'choose a checkpoint with adapters'
        )
    reader = open_parameters(step_directory, config.model)
    arrays = {
        path: StreamedArray(shape, functools.partial(reader.read, path), is_stacked(path))
        for path, shape in reader.shapes.items()
    }
    parameters = sum(array.size for array in arrays.values())
    check_space('--output', workdir, 4 * parameters)
    with (
        new_directory('--output', workdir) as partial,
        progress_bar('merge', total=num_reads(arrays), unit='array', show=show) as bar,
    ):
        (partial / CONFIG).write_text(to_json(_merged_config(config, str(source / CONFIG))), encoding='utf-8')
        for name in MODEL_FILES:
            if (source / name).is_file():
                (partial / name).write_bytes((source / name).read_bytes())
        write_step(partial, 0, arrays, on_read=bar.update)
    return MergeResult(workdir, parameters)


def _merged_config(config: Config, source: str) -> Config:
    # The attention kernel depends on the device that runs the model.
    model = dataclasses.replace(without_adapters(config.model), attention='auto', norm_kernel='xla', fp8_kernel='xla')
    merged = config_for_model(dataclasses.asdict(model), source)
    return dataclasses.replace(merged, data=dataclasses.replace(merged.data, seq_len=config.data.seq_len))
