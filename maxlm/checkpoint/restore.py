"""Restores the train state from a step and verifies its checksums, consistently in all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from maxlm.checkpoint import checksums
from maxlm.checkpoint.async_save import SOURCE
from maxlm.checkpoint.item_metadata import (
    REMEDY,
    CorruptCheckpointError,
    item_metadata,
    named_leaves,
    read_json,
    translate_errors,
)
from maxlm.checkpoint.params import check_tree, copy_params, read_arrays, verify_items
from maxlm.config.sections.optimizer import GuardConfig
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.training.fp8_history import fp8_history_from_json, fp8_history_to_json
from maxlm.training.loss_scale import LossScale
from maxlm.training.spike_guard import spike_window_from_json, spike_window_to_json
from maxlm.training.state import TrainState

# Key of the `progress` item.
VALIDATION_LOSS = 'validation_loss'

T = TypeVar('T')


class RestoredState(NamedTuple):
    """Restored train state.

    Attributes:
        state: the train state.
        fingerprint: data fingerprint: the settings that determine the order of the data.
        history: other JSON data of the run.
        source: arrays of the batch source; {} if the step has none.
    """

    state: TrainState
    fingerprint: dict[str, Any]
    history: dict[str, Any]
    source: dict[str, np.ndarray]


def is_params_only(path: epath.Path) -> bool:
    """Returns True if a step was saved with parameters and without optimizer state, like an imported model."""
    if not (path / 'params').is_dir():
        return False
    try:
        stored = checksums.read_checksums(path)
    except CorruptCheckpointError:
        return False
    # `drop_optimizer` first changes the checksums, and then deletes the item.
    return 'optimizer' not in stored if stored is not None else not (path / 'optimizer').is_dir()


def items_of(state: TrainState) -> dict[str, Any]:
    """Returns the array items of a state by name."""
    trees = {'params': state.params, 'optimizer': state.opt_state}
    return trees if state.ema is None else {**trees, 'ema': state.ema}


def progress_of(
    step: int, state: TrainState, validation_loss: float | None, history: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the item `progress` of a step, which `restore_step` reads. For the arguments see `Checkpoints.save`."""
    progress: dict[str, Any] = {'step': step, 'skipped': int(state.skipped), checksums.ITEM: checksums.VERSION}
    if state.loss_scale is not None:
        progress |= {'loss_scale': float(state.loss_scale.scale), 'good_steps': int(state.loss_scale.good_steps)}
    if state.spike_window is not None:
        progress['window'] = spike_window_to_json(state.spike_window)
    if state.fp8_history is not None:
        progress['fp8_history'] = fp8_history_to_json(state.fp8_history)
    # JSON has no infinity, and a non-finite loss cannot rank checkpoints.
    if validation_loss is not None and np.isfinite(validation_loss):
        progress[VALIDATION_LOSS] = validation_loss
    if history:
        progress['history'] = dict(history)
    return progress


def restore_step(path: epath.Path, abstract: TrainState, *, loss_scale: float = 1.0) -> RestoredState:
    """Restores the state of a step, sharded like `abstract`. All processes call it together.

    If the step has no `ema` and `abstract` has one, it starts as a copy of the parameters. If only the step has an
    `ema`, it is ignored.

    Args:
        path: directory of the step.
        abstract: result of `abstract_state`.
        loss_scale: loss scale for a step without one.

    Raises:
        CorruptCheckpointError: some process cannot read the step, or it differs from the saved one.
        InputError: the step was saved by another model or optimizer.
    """
    trees, progress, fingerprint, stored = _agree_on_errors(path, lambda: _read(path, abstract))
    if stored is not None:
        verify_items(path, trees, stored)
    elif jax.process_index() == 0:
        logger.warning(f'step {path.name} was saved without checksums: its integrity cannot be verified')
    counters = tuple(jnp.int32(int(progress[name])) for name in ('step', 'skipped'))
    scale = None
    if abstract.loss_scale is not None:
        # A step of a run in another dtype has no loss scale.
        first = float(progress.get('loss_scale', loss_scale))
        scale = LossScale(jnp.float32(first), jnp.int32(int(progress.get('good_steps', 0))))
    spike_window = None
    if abstract.spike_window is not None:
        # A step of a run with another window size contains a shorter or longer window, or none.
        config = GuardConfig(spike_window=abstract.spike_window.good_QW.shape[1])
        spike_window = spike_window_from_json(progress.get('window'), config)
    history = None
    if abstract.fp8_history is not None:
        history = fp8_history_from_json(progress.get('fp8_history'), abstract.fp8_history.shape)
    replicated = (*counters, scale, spike_window, history)
    step, skipped, scale, spike_window, history = jax.device_put(replicated, abstract.step.sharding)
    ema = trees.get('ema')
    if abstract.ema is not None and ema is None:
        logger.info(
            f'step {path.name} was saved without an EMA of the parameters: initializing the EMA to the parameters'
        )
        ema = copy_params(trees['params'])
    state = TrainState(
        step, skipped, trees['params'], trees['optimizer'], ema, scale, spike_window, fp8_history=history
    )
    return RestoredState(state, fingerprint, progress.get('history') or {}, trees.get(SOURCE, {}))


def _read(path: epath.Path, abstract: TrainState) -> tuple[dict[str, Any], dict, dict, dict | None]:
    """Returns the array items, `progress`, `data` and checksums of a step, read by this process alone."""
    if is_params_only(path):
        raise InputError(
            f'{path / "optimizer"}: missing from the checkpoint, which contains only parameters (an import, '
            '--weights-only or --drop-optimizer); resume from a step with optimizer state, or start a new run from its '
            f'parameters with another --workdir and --config.train.init_from={path}'
        )
    stored = checksums.read_checksums(path)
    progress, fingerprint = (read_json(path / item) for item in checksums.JSON_ITEMS)
    if stored is None and checksums.ITEM in progress:
        raise CorruptCheckpointError(f'{path / checksums.ITEM}: missing from the checkpoint; {REMEDY}')
    if stored is not None:
        checksums.check_items(path, stored)
        for item, content in zip(checksums.JSON_ITEMS, (progress, fingerprint), strict=True):
            checksums.verify_checksums(path / item, stored, checksums.json_checksum(content))
    translate_errors(path / 'progress', lambda: [int(progress[name]) for name in ('step', 'skipped')])
    trees = items_of(abstract)
    if not (path / 'ema').is_dir():
        trees.pop('ema', None)
    if (path / SOURCE).is_dir():
        # Its shapes depend on the step, not on the config.
        leaves = named_leaves(item_metadata(path / SOURCE))
        trees[SOURCE] = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    for item, tree in trees.items():
        check_tree(path / item, tree, stored=stored)
    return {item: read_arrays(path / item, tree) for item, tree in trees.items()}, progress, fingerprint, stored


def _agree_on_errors(path: epath.Path, read: Callable[[], T]) -> T:
    """Returns `read()`. Raises the CorruptCheckpointError of any process in all, so that they restore the same step."""
    if jax.process_count() == 1:
        return read()
    result, failure = None, None
    try:
        result = read()
    except CorruptCheckpointError as error:
        failure = str(error)
    failed = multihost_utils.process_allgather(np.asarray(failure is not None))
    if failure is not None:
        raise CorruptCheckpointError(failure)
    if failed.any():
        raise CorruptCheckpointError(f'{path}: cannot be read by process {int(np.argmax(failed))}; {REMEDY}')
    assert result is not None
    return result
