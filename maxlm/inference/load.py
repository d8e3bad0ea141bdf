"""Loads a trained model from a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx

from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.params import params_item, restore_params, without_training_modules
from maxlm.config.resolve import resolve_on
from maxlm.config.schema import Config, ModelConfig, TrainConfig
from maxlm.config.sections.quantization import QUANTIZATION_GROUPS, ROUNDED_INPUTS
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.hardware.chips import capability_of
from maxlm.inference.quantize_checkpoint import parse_weights, quantized_config, read_quantized
from maxlm.log import logger
from maxlm.model.layers.rounded_inputs import check_model
from maxlm.parallel.layout import Layout, make_layout
from maxlm.runtime.compilation_cache import enable_compilation_cache
from maxlm.training.state import abstract_model, param_shardings
from maxlm.workdir.files import CHAT_TEMPLATE, TOKENIZER, read_config


class LoadedModel(NamedTuple):
    """A model, its tokenizer and its chat template, placed on the available devices.

    Attributes:
        config: config resolved for these devices.
        layout: layout of the parameters.
        params: parameters, or None if an engine holds a converted copy.
        tokenizer: tokenizer of the run.
        tokenizer_path: path of the tokenizer file.
        step: step of the checkpoint.
        chat: encoder of conversations, or None for a base model.
    """

    config: Config
    layout: Layout
    params: Any
    tokenizer: Tokenizer
    tokenizer_path: Path
    step: int
    chat: ChatEncoder | None = None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: ends of text and, for a chat model, end of turn."""
        turn = () if self.chat is None else (self.chat.end_of_turn,)
        return tuple(dict.fromkeys((*self.tokenizer.boundaries.stops, *turn)))

    def without_params(self) -> LoadedModel:
        """Returns the model without parameters, for callers whose engine holds a converted copy."""
        return self._replace(params=None)


def load_model(checkpoint: str, *, num_devices: int, quantize: str = '', share_layers: bool = False) -> LoadedModel:
    """Loads a model from a checkpoint, and enables the default compilation cache unless its run had none.

    Loads the EMA of the parameters if the run kept one, and no modules of multi-token prediction. A CPU computes in
    float32. Logs a warning if a chat template cannot be used.

    Args:
        checkpoint: a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or the directory of one step. The
            workdir may be in a bucket.
        num_devices: number of local devices to use.
        quantize: weight type (int8, int4, fp8) to which float32 kernels are quantized in memory; w8a8 and w4a8: int8
            and int4, with inputs rounded to 8 bits in generation on a CPU; '' = no quantization. A checkpoint in int8
            can be loaded with w8a8, and one in int4 with w4a8.
        share_layers: shard each layer over all devices (mesh.tensor) for low latency instead of using the run's mesh.

    Raises:
        InputError: the checkpoint does not exist, cannot be read, has no tokenizer, or cannot be quantized.
    """
    step_directory = find_local_step(checkpoint)
    workdir = step_directory.parent.parent
    saved_config = read_config(workdir)
    # Programs of the cache run when they are loaded, so a checkpoint from elsewhere must not choose the directory.
    enable_compilation_cache(TrainConfig().compilation_cache_dir if saved_config.train.compilation_cache_dir else '')
    if saved_config.model.reward_head:
        raise InputError(
            f'--checkpoint={checkpoint}: is a reward model, which scores conversations and generates no text; use it '
            'with grpo.reward_model, or export it with maxlm hf export'
        )
    if quantize not in ('', *QUANTIZATION_GROUPS, *ROUNDED_INPUTS):
        names = ', '.join((*QUANTIZATION_GROUPS, *ROUNDED_INPUTS))
        raise InputError(f'quantize={quantize!r} is unknown; use one of {names}')
    # Not from the checkpoint, whose model may not support rounded inputs.
    rounding: Literal['int8', 'none'] = 'int8' if quantize in ROUNDED_INPUTS else 'none'
    model = dataclasses.replace(_inference_model(saved_config.model), activation_quantization=rounding)
    saved_config = dataclasses.replace(saved_config, model=model)
    tokenizer_path = workdir / TOKENIZER
    if not tokenizer_path.is_file():
        raise InputError(
            f'--checkpoint={checkpoint}: {TOKENIZER} is missing; copy the tokenizer of the model to {tokenizer_path}'
        )
    devices = jax.devices()[:num_devices]
    kind = ROUNDED_INPUTS.get(quantize, quantize)
    is_stored = quantize in ROUNDED_INPUTS and model.weight_quantization == kind
    weights = parse_weights(kind) if kind and not is_stored else None
    config = resolve_on(
        saved_config if weights is None else quantized_config(saved_config, weights, f'--checkpoint={checkpoint}'),
        platform=jax.default_backend(),
        num_devices=num_devices,
        capability=capability_of(devices[0]),
        share_layers=share_layers,
    )
    layout = make_layout(config.mesh, devices)
    if quantize in ROUNDED_INPUTS:
        _check_rounded_inputs(config, layout, quantize)
    abstract = _abstract_params(config, layout)
    if weights is None:
        params = restore_params(step_directory, abstract, item=params_item(step_directory))
    else:
        params = read_quantized(step_directory, saved_config, weights, abstract)
    tokenizer = Tokenizer.load(tokenizer_path)
    return LoadedModel(config, layout, params, tokenizer, tokenizer_path, int(step_directory.name), _load_chat(workdir))


def _inference_model(model: ModelConfig) -> ModelConfig:
    """Returns the model without the modules that only training uses, in float32 on a CPU.

    Without instructions for bfloat16, XLA converts each kernel to float32 for every product, which takes several times
    as long as the product.
    """
    model = without_training_modules(model)
    return dataclasses.replace(model, dtype='float32') if jax.default_backend() == 'cpu' else model


def _check_rounded_inputs(config: Config, layout: Layout, quantize: str) -> None:
    """Raises InputError if generation cannot round the inputs of the kernels to 8 bits."""
    kind, num_devices = ROUNDED_INPUTS[quantize], layout.mesh.size
    if layout.platform != 'cpu' or num_devices > 1:
        found = layout.platform if layout.platform != 'cpu' else f'{num_devices} devices'
        raise InputError(f'--quantize={quantize}: is for one CPU device, but found {found}; use --quantize={kind}')
    try:
        check_model(config.model)
    except InputError as error:
        raise InputError(f'--quantize={quantize}: {error}') from error


def _abstract_params(config: Config, layout: Layout) -> Any:
    """Returns shapes, dtypes and shardings of the parameters, without optimizer state: codes have no optimizer."""
    _, variables = nnx.split(abstract_model(config, layout))
    shapes = nnx.to_pure_dict(nnx.map_state(lambda _, variable: variable.get_value(), variables))
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        param_shardings(config, layout),
    )


def _load_chat(workdir: Path) -> ChatEncoder | None:
    if not (workdir / CHAT_TEMPLATE).is_file():
        return None
    try:
        return ChatEncoder.load(workdir)
    except InputError as error:
        logger.warning(f'{error}; continuing without a chat template')
        return None
