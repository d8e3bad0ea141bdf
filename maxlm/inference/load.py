"""A trained model from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxlm.config.keys import Config
from maxlm.config.resolve import resolve_on
from maxlm.data.chat_tokens import ChatEncoder
from maxlm.data.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.planning.chips import capability_of
from maxlm.runtime.console import logger
from maxlm.runtime.fetching import find_step_here
from maxlm.runtime.items import params_item, restore_params
from maxlm.runtime.workdir import CHAT_TEMPLATE, TOKENIZER, read_config
from maxlm.training.sharding import Layout, make_layout
from maxlm.training.state import abstract_state


class LoadedModel(NamedTuple):
    """Parameters with what is needed to run them on the devices that are here."""

    # Resolved for these devices.
    config: Config
    layout: Layout
    params: Any
    tokenizer: Tokenizer
    tokenizer_path: Path
    step: int
    # Of a model that answers: how conversations are spelled.
    chat: ChatEncoder | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids at which a text is over: the end of document, and that of a turn."""
        return (self.tokenizer.end_of_document, *(() if self.chat is None else (self.chat.end_of_turn,)))


def load_model(checkpoint: str, *, num_devices: int) -> LoadedModel:
    """Reads a checkpoint: a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or one step's directory; a
    workdir may be in a bucket.

    The parameters are their moving average where the run kept one. A chat template that cannot be used is a warning.

    Raises:
        InputError: it is not there, cannot be read, or has no tokenizer.
    """
    step_directory = find_step_here(checkpoint)
    workdir = step_directory.parent.parent
    tokenizer_path = workdir / TOKENIZER
    if not tokenizer_path.is_file():
        raise InputError(
            f'--checkpoint={checkpoint} has no {TOKENIZER}, without which it can take no text; '
            f'put the one of the model at {tokenizer_path}'
        )
    devices = jax.devices()[:num_devices]
    config = resolve_on(
        read_config(workdir),
        platform=jax.default_backend(),
        num_devices=num_devices,
        capability=capability_of(devices[0]),
    )
    layout = make_layout(config.mesh, devices)
    abstract = abstract_state(config, layout).params
    params = restore_params(step_directory, abstract, item=params_item(step_directory))
    tokenizer = Tokenizer.load(tokenizer_path)
    return LoadedModel(config, layout, params, tokenizer, tokenizer_path, int(step_directory.name), _load_chat(workdir))


def _load_chat(workdir: Path) -> ChatEncoder | None:
    if not (workdir / CHAT_TEMPLATE).is_file():
        return None
    try:
        return ChatEncoder.load(workdir)
    except InputError as error:
        logger.warning(f'{error}; the model is used without its chat template')
        return None
