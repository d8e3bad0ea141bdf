"""The state that a run starts with: of its newest checkpoint, with the parameters of another one, or random."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlm.config.keys import Config
from maxlm.data.batches import fingerprint_changes
from maxlm.data.records import Dataset
from maxlm.data.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.runtime.checkpoint import Checkpoints, find_step, saved_steps
from maxlm.runtime.console import logger
from maxlm.runtime.items import check_params, copy_params, params_item, restore_params
from maxlm.runtime.step_folder import FOLDER
from maxlm.runtime.stored import DamagedError, read_json
from maxlm.runtime.workdir import TOKENIZER
from maxlm.training.decisions import Decisions, from_json
from maxlm.training.sharding import Layout
from maxlm.training.step import Params, TrainState, init_state

INIT_FROM = 'train.init_from'


def newest_decisions(workdir: Any) -> tuple[int, Decisions]:
    """The step that a run will go on from and what it has decided, as far as can be told without reading its state."""
    steps = saved_steps(workdir)
    if not steps:
        return 0, Decisions()
    try:
        history = read_json(workdir / FOLDER / str(steps[-1]) / 'progress').get('history', {})
    except DamagedError:
        # An older one will be used, or an import has none.
        history = {}
    return steps[-1], from_json(history.get('decisions'))


def check_init_from(config: Config, abstract: Params, workdir: Path) -> None:
    """Checks, before anything is written, the checkpoint that a new run is to start from.

    Args:
        config: resolved.
        abstract: shapes and types of the config's parameters.
        workdir: of the run. If there is a checkpoint in it already, the run goes on from that.

    Raises:
        InputError: it is not there, or its parameters are not those of the config's model.
    """
    if config.train.init_from and not saved_steps(workdir):
        origin = find_step(config.train.init_from, key=INIT_FROM)
        check_params(origin, abstract, key=f'{INIT_FROM}={config.train.init_from}')


def start_state(
    config: Config,
    *,
    dataset: Dataset,
    layout: Layout,
    abstract: TrainState,
    checkpoints: Checkpoints,
    facts: dict[str, Any],
) -> tuple[TrainState, Mapping[str, Any]]:
    """The state before the next step, and the history that was saved with it.

    Args:
        config: resolved.
        dataset: what the run trains on.
        layout: where the state is placed.
        abstract: as `abstract_state` returns it.
        checkpoints: those of the run's workdir. It goes on from the newest that is whole.
        facts: `Corpus.fingerprint` of the data, which must be the same as that of the run so far.

    Raises:
        InputError: the checkpoint cannot be read, or is of another model, optimizer, order of data or tokenizer.
    """
    restored = checkpoints.restore_newest(abstract, loss_scale=config.train.loss_scale)
    if restored is None:
        return first_state(config, dataset=dataset, layout=layout, abstract=abstract, checkpoints=checkpoints), {}
    _check_same_data(restored.fingerprint, facts, allow_change=config.data.allow_change)
    logger.info(f'going on from step {int(restored.state.step)}')
    return restored.state, restored.history


def first_state(
    config: Config, *, dataset: Dataset, layout: Layout, abstract: TrainState, checkpoints: Checkpoints
) -> TrainState:
    """The state before the first step.

    Args:
        config, dataset, layout, abstract: as for `start_state`.
        checkpoints: those of the run's workdir. A step 0 that holds parameters only, as an import leaves it, is where
            the run starts.

    Raises:
        InputError: the checkpoint to start with cannot be read, or is of another model or tokenizer.
    """
    imported = checkpoints.holds_only_params(0)
    state = init_state(config, layout)
    if not (imported or config.train.init_from):
        return state
    origin = checkpoints.directory / '0' if imported else find_step(config.train.init_from, key=INIT_FROM)
    _check_tokenizer(origin, dataset, refuse=imported)
    # The random parameters make room before others are read.
    state = state._replace(params=None, ema=None)
    item = params_item(origin)
    params = restore_params(origin, abstract.params, item=item)
    logger.info(f'starting with the parameters of {origin / item} and a fresh optimizer')
    return state._replace(params=params, ema=None if abstract.ema is None else copy_params(params))


def _check_same_data(stored: dict[str, Any], present: dict[str, Any], *, allow_change: bool) -> None:
    """The step tells the position in the data only as long as their order is the same."""
    changes = fingerprint_changes(stored, present)
    if changes and not allow_change:
        raise InputError(
            f'the run cannot go on with other data: {changes}; put it back, use a new workdir, or set '
            f'data.allow_change=True to go on at the same step of the new order'
        )
    if changes:
        logger.warning(f'going on with other data (data.allow_change): {changes}')


def _check_tokenizer(origin: Path, dataset: Dataset, *, refuse: bool) -> None:
    """Compares the data set's tokenizer with the one that lies with a checkpoint, where one does."""
    path = origin.parent.parent / TOKENIZER
    if not path.is_file() or Tokenizer.load(path).sha256 == Tokenizer.load(dataset.tokenizer_path).sha256:
        return
    message = (
        f'{dataset.tokenizer_path} is not the tokenizer of the model that the run starts with, which is {path}; '
        f'prepare the data with --tokenizer {path}'
    )
    if refuse:
        # Going on would put the data set's in its place, and the model would have lost its own.
        raise InputError(message)
    logger.warning(message)
