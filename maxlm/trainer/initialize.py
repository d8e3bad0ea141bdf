"""The state that a run starts with: of its newest checkpoint, with the parameters of another one, or random."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from etils import epath

from maxlm.checkpoint import checksums
from maxlm.checkpoint.init_from import context_line, load_tokenizer, open_init_checkpoint
from maxlm.checkpoint.item_metadata import CorruptCheckpointError, read_json
from maxlm.checkpoint.manager import Checkpoints, find_step, saved_steps
from maxlm.checkpoint.params import copy_params, params_item
from maxlm.config.schema import Config
from maxlm.data.loader.batches import fingerprint_changes
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.parallel.layout import Layout
from maxlm.training.reference import to_reference
from maxlm.training.run_control import RunControl, from_json
from maxlm.training.state import Params, TrainState, init_state
from maxlm.workdir.files import TOKENIZER
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR

INIT_FROM = 'train.init_from'


def newest_decisions(workdir: Any) -> tuple[int, RunControl]:
    """The step that a run will go on from and what it has decided, as far as can be told without reading its state."""
    steps = saved_steps(workdir)
    if not steps:
        return 0, RunControl()
    try:
        history = read_json(workdir / CHECKPOINTS_DIR / str(steps[-1]) / 'progress').get('history', {})
    except CorruptCheckpointError:
        # An older one will be used, or an import has none.
        history = {}
    return steps[-1], from_json(history.get('decisions'))


def check_init_from(config: Config, abstract: Params, workdir: Path, *, tokenizer: Path | None = None) -> None:
    """Checks, before anything is written, the checkpoint that a new run is to start from.

    Args:
        config: resolved.
        abstract: shapes and types of the config's parameters.
        workdir: of the run. If there is a checkpoint in it already, the run goes on from that.
        tokenizer: `tokenizer.json` of the run's data; None = the checkpoint's own.

    Raises:
        InputError: it is not there, or its parameters are not those of the config's model, and cannot become them.
    """
    if config.train.init_from and not saved_steps(workdir):
        origin = find_step(config.train.init_from, key=INIT_FROM)
        try:
            open_init_checkpoint(origin, config, abstract, tokenizer=tokenizer)
        except InputError as error:
            raise InputError(f'{INIT_FROM}={config.train.init_from}: {error}') from None


def restore_or_initialize(
    config: Config,
    *,
    tokenizer: Path,
    layout: Layout,
    abstract: TrainState,
    checkpoints: Checkpoints,
    facts: dict[str, Any],
) -> tuple[TrainState, Mapping[str, Any]]:
    """The state before the next step, and the history that was saved with it.

    Args:
        config: resolved.
        tokenizer: `tokenizer.json` of what the run learns from.
        layout: where the state is placed.
        abstract: as `abstract_state` returns it.
        checkpoints: those of the run's workdir. It goes on from the newest that is whole.
        facts: `BatchSource.fingerprint` and `reference_metadata`, which must be the same as those of the run so far.

    Raises:
        InputError: the checkpoint cannot be read, or is of another model, optimizer, order of data or tokenizer.
    """
    restored = checkpoints.restore_newest(abstract, loss_scale=config.train.initial_loss_scale)
    if restored is None:
        return initialize_state(
            config, tokenizer=tokenizer, layout=layout, abstract=abstract, checkpoints=checkpoints
        ), {}
    _check_same_data(restored.fingerprint, facts, allow_dataset_change=config.data.allow_dataset_change)
    logger.info(f'going on from step {int(restored.state.step)}')
    state = restored.state
    if abstract.reference is not None:
        origin = open_init_checkpoint(_origin_of(config), config, abstract.params, tokenizer=tokenizer)
        missing = origin.missing(init_state(config, layout).params) if config.model.lora_rank else {}
        params = origin.read(abstract.params, missing)
        state = state._replace(reference=reference_of(config, params, abstract))
    return state, restored.history


def initialize_state(
    config: Config, *, tokenizer: Path, layout: Layout, abstract: TrainState, checkpoints: Checkpoints
) -> TrainState:
    """The state before the first step.

    Args:
        config, tokenizer, layout, abstract: as for `restore_or_initialize`.
        checkpoints: those of the run's workdir. A step 0 that holds parameters only, as an import leaves it, is where
            the run starts.

    Raises:
        InputError: the checkpoint to start with cannot be read, or is of another model or tokenizer.
    """
    imported = checkpoints.holds_only_params(0)
    state = init_state(config, layout)
    if not (imported or config.train.init_from):
        return state
    step = checkpoints.directory / '0' if imported else _origin_of(config)
    if imported:
        _check_same_tokenizer(step, tokenizer)
    origin = open_init_checkpoint(step, config, abstract.params, tokenizer=tokenizer)
    if origin.other_tokenizer:
        logger.warning(origin.other_tokenizer)
    # The random parameters make room before others are read; only what these lack stays.
    initial = origin.missing(state.params)
    state = state._replace(params=None, ema=None, reference=None)
    params = origin.read(abstract.params, initial)
    logger.info(f'starting with the parameters of {origin.path} and a fresh optimizer')
    for line in (origin.growth, context_line(step, config)):
        if line:
            logger.info(str(line))
    ema = None if abstract.ema is None else copy_params(params)
    return state._replace(params=params, ema=ema, reference=reference_of(config, params, abstract))


def reference_metadata(config: Config) -> dict[str, str]:
    """What tells the reference of a run from another one, for a checkpoint; nothing where there is none."""
    if not config.has_reference or not config.train.init_from:
        return {}
    step = _origin_of(config)
    sums = (checksums.read_checksums(step) or {}).get(params_item(step), {})
    return {'reference': hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()} if sums else {}


def _origin_of(config: Config) -> epath.Path:
    return find_step(config.train.init_from, key=INIT_FROM)


def reference_of(config: Config, params: Params, abstract: TrainState) -> Params | None:
    """The reference of a run that starts with `params`, where it has one that lies beside its parameters."""
    if abstract.reference is None:
        return None
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.reference)
    reference: Params = jax.jit(partial(to_reference, config), out_shardings=shardings)(params)
    return reference


def _check_same_data(stored: dict[str, Any], present: dict[str, Any], *, allow_dataset_change: bool) -> None:
    """The step tells the position in the data only as long as their order is the same."""
    changes = fingerprint_changes(stored, present)
    if changes and not allow_dataset_change:
        raise InputError(
            f'the run cannot go on with other data: {changes}; put it back, use a new workdir, or set '
            f'data.allow_dataset_change=True to go on at the same step of the new order'
        )
    if changes:
        logger.warning(f'going on with other data (data.allow_dataset_change): {changes}')


def _check_same_tokenizer(step: epath.Path, tokenizer: Path) -> None:
    """Compares the data set's tokenizer with the one that lies with an import, where one does."""
    path = step.parent.parent / TOKENIZER
    if path.is_file() and load_tokenizer(path).sha256 != Tokenizer.load(tokenizer).sha256:
        # Going on would put the data set's in its place, and the model would have lost its own.
        raise InputError(
            f'{tokenizer} is not the tokenizer of the model that the run starts with, which is {path}; '
            f'prepare the data with --tokenizer {path}, or, where it has only more tokens, start a new run with '
            f'another --workdir and --config.{INIT_FROM}={path.parent}'
        )
