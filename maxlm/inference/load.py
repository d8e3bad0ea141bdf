"""Loads a trained model from a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.params import params_item, restore_params, without_training_modules
from maxlm.config.resolve import resolve_on
from maxlm.config.schema import Config, TrainConfig
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.hardware.chips import capability_of
from maxlm.inference.quantize_checkpoint import parse_weights, quantized_config, read_quantized
from maxlm.log import logger
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

    Loads the EMA of the parameters if the run kept one, and no modules of multi-token prediction. Logs a warning if a
    chat template cannot be used.

    Args:
        checkpoint: a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or the directory of one step. The
            workdir may be in a bucket.
        num_devices: number of local devices to use.
        quantize: weight type (int8, int4, fp8) to which float32 kernels are quantized in memory; '' = no
            quantization.
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
    saved_config = dataclasses.replace(saved_config, model=without_training_modules(saved_config.model))
    tokenizer_path = workdir / TOKENIZER
    if not tokenizer_path.is_file():
        raise InputError(
            f'--checkpoint={checkpoint}: {TOKENIZER} is missing; copy the tokenizer of the model to {tokenizer_path}'
        )
    devices = jax.devices()[:num_devices]
    weights = parse_weights(quantize) if quantize else None
    config = resolve_on(
        saved_config if weights is None else quantized_config(saved_config, weights, f'--checkpoint={checkpoint}'),
        platform=jax.default_backend(),
        num_devices=num_devices,
        capability=capability_of(devices[0]),
        share_layers=share_layers,
    )
    layout = make_layout(config.mesh, devices)
    abstract = _abstract_params(config, layout)
    if weights is None:
        params = restore_params(step_directory, abstract, item=params_item(step_directory))
    else:
        params = read_quantized(step_directory, saved_config, weights, abstract)
    tokenizer = Tokenizer.load(tokenizer_path)
    return LoadedModel(config, layout, params, tokenizer, tokenizer_path, int(step_directory.name), _load_chat(workdir))


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
