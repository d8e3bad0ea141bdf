"""Checkpoints with Orbax: parameters, optimizer state, progress and data fingerprint as separate items of a step.

    WORKDIR/checkpoints/<step>/{params, ema, optimizer, progress, data}

Parameters stand alone, so that sampling, evaluation and download need not touch the optimizer state; `ema`, their
moving average, is there where the run kept one. A step becomes visible under its number only when all of it is written.
"""

from __future__ import annotations

import concurrent.futures
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from maxlm.errors import InputError
from maxlm.runtime.console import logger
from maxlm.training.loss_scale import LossScale
from maxlm.training.step import Params, TrainState

FOLDER = 'checkpoints'
TRASH = '_trash'
# In the path of every array that is stacked over layers: [L, …].
STACK = 'blocks'

T = TypeVar('T')


class Restored(NamedTuple):
    """A state and the facts on which the order of its data depends."""

    state: TrainState
    fingerprint: dict[str, Any]


class Checkpoints:
    """The checkpoints of one workdir. Saves run in the background; leaving the context waits for the last."""

    def __init__(self, workdir: Path, *, keep_last: int):
        self.directory = workdir.resolve() / FOLDER
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            # A step that goes is renamed first. Deleted in place, a kill would leave a visible half of it. Orbax leaves
            # it at that, so the emptying is ours.
            todelete_subdir=TRASH,
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=_handlers())
        # In the background: a large step takes long to delete on some file systems.
        self._cleaner = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='empty-trash')
        self._cleaner.submit(self._empty_trash)

    def latest_step(self) -> int | None:
        """Newest complete step."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, fingerprint: dict[str, Any]) -> None:
        """Copies the state off the device and writes it in the background."""
        trees = {'params': state.params, 'optimizer': state.opt_state}
        if state.ema is not None:
            trees['ema'] = state.ema
        progress: dict[str, float] = {'step': step, 'skipped': int(state.skipped)}
        if state.loss_scale is not None:
            progress |= {'loss_scale': float(state.loss_scale.scale), 'good_steps': int(state.loss_scale.good_steps)}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(tree, save_args=by_layer(tree)) for name, tree in trees.items()},
                progress=ocp.args.JsonSave(progress),
                data=ocp.args.JsonSave(fingerprint),
            ),
        )
        self._cleaner.submit(self._empty_trash)

    def holds_only_params(self, step: int) -> bool:
        """Whether a step has parameters and no optimizer state, as an import leaves it."""
        path = self.directory / str(step)
        return (path / 'params').is_dir() and not (path / 'optimizer').is_dir()

    def restore(self, step: int, abstract: TrainState, *, loss_scale: float = 1.0) -> Restored:
        """The state of a step, placed as `abstract` says. `loss_scale` is that of a step which has none.

        A moving average that `abstract` has and the step has not starts at the parameters; one that only the step has
        is left there.

        Raises:
            InputError: the step cannot be read, or was made by another model or optimizer.
        """
        path = self.directory / str(step)
        if self.holds_only_params(step):
            raise InputError(
                f'{path / "optimizer"}: missing in the checkpoint; remove {path} to go on from the one before, or '
                f'start a new run from its parameters with another --workdir and --config.train.init_from={path}'
            )
        trees = {'params': abstract.params, 'optimizer': abstract.opt_state}
        if abstract.ema is not None and (path / 'ema').is_dir():
            trees['ema'] = abstract.ema
        for name, tree in trees.items():
            _check_tree(path / name, tree)
        arguments = ocp.args.Composite(
            **{name: ocp.args.StandardRestore(tree) for name, tree in trees.items()},
            progress=ocp.args.JsonRestore(),
            data=ocp.args.JsonRestore(),
        )

        def read() -> tuple[Any, tuple[Any, ...]]:
            items = self._manager.restore(step, args=arguments)
            if not isinstance(items.data, dict):
                raise TypeError(f'data holds {items.data!r}')
            counters = tuple(jnp.int32(int(items.progress[name])) for name in ('step', 'skipped'))
            scale = None
            if abstract.loss_scale is not None:
                # A run that went on in another type before has none: it starts anew.
                first = float(items.progress.get('loss_scale', loss_scale))
                scale = LossScale(jnp.float32(first), jnp.int32(int(items.progress.get('good_steps', 0))))
            return items, jax.device_put((*counters, scale), abstract.step.sharding)

        items, (step_counter, skipped, scale) = reading(path, read)
        ema = items.ema if 'ema' in trees else None
        if abstract.ema is not None and ema is None:
            logger.info(f'step {step} was saved without a moving average of the parameters: it starts at their values')
            ema = copy_params(items.params)
        return Restored(TrainState(step_counter, skipped, items.params, items.optimizer, ema, scale), items.data)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
        self._cleaner.submit(self._empty_trash)
        self._cleaner.shutdown()

    def _empty_trash(self) -> None:
        if jax.process_index() == 0:
            # The folder itself stays: Orbax may be about to move something into it.
            for step in (self.directory / TRASH).glob('*'):
                shutil.rmtree(step, ignore_errors=True)


def restore_params(step_directory: Path, abstract: Params, *, item: str = 'params') -> Params:
    """The parameters alone of one step's directory, placed as `abstract` says; `item` as `params_item` returns it.

    Raises:
        InputError: they cannot be read, or are those of another model.
    """
    path = step_directory.resolve() / item
    _check_tree(path, abstract)
    with ocp.StandardCheckpointer() as checkpointer:
        return reading(path, lambda: checkpointer.restore(path, abstract))


def params_item(step_directory: Path) -> str:
    """The parameters of a step that are used: `ema`, their moving average, where the run kept one; else `params`."""
    return 'ema' if (step_directory / 'ema').is_dir() else 'params'


def check_params(step_directory: Path, abstract: Params, *, key: str) -> None:
    """Compares what `params_item` names in a step with what is wanted, without reading the arrays.

    Raises:
        InputError: it is missing, or of another model. The message begins with `key`, which asked for this step.
    """
    advice = 'choose a checkpoint of this model, or the model of the checkpoint'
    try:
        _check_tree(step_directory.resolve() / params_item(step_directory), abstract, advice)
    except InputError as error:
        raise InputError(f'{key}: {error}') from None


def copy_params(params: Params) -> Params:
    """The same values in arrays of their own: the memory of an array that a state holds twice cannot be reused."""
    return jax.tree.map(jnp.copy, params)


def by_layer(tree: Any) -> Any:
    """What has Orbax store stacked arrays in pieces of one layer, so that a layer can be read without the others."""

    def arguments(path: tuple[Any, ...], leaf: Any) -> ocp.SaveArgs:
        stacked = leaf.shape and STACK in map(_key, path)
        return ocp.SaveArgs(shard_axes=(0,) if stacked else ())

    return jax.tree_util.tree_map_with_path(arguments, tree)


def saved_steps(workdir: Path) -> list[int]:
    """The complete steps of a workdir, oldest first."""
    folder = workdir / FOLDER
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []


def find_step(checkpoint: str, *, key: str = '--checkpoint') -> Path:
    """The directory of one step: from a workdir (its newest), `WORKDIR@STEP`, or the step's directory itself.

    Raises:
        InputError: there is no such checkpoint; the message names `key`, which has it, and lists the steps there are.
    """
    directory, wanted = Path(checkpoint), ''
    # A directory may have an @ in its name, so what is there as it stands comes first.
    if not directory.exists() and '@' in checkpoint:
        path, _, wanted = checkpoint.rpartition('@')
        directory = Path(path)
    if not wanted and directory.name.isdigit() and directory.parent.name == FOLDER and directory.is_dir():
        return directory
    folder, steps = directory / FOLDER, saved_steps(directory)
    if not steps:
        raise InputError(f'{key}={checkpoint}: no checkpoint in {folder}; give a workdir of maxlm.train')
    if not wanted:
        return folder / str(steps[-1])
    if not (wanted.isdigit() and int(wanted) in steps):
        raise InputError(f'{key}={checkpoint}: no step {wanted!r} there; steps: {", ".join(map(str, steps))}')
    return folder / wanted


def reading(path: Path, read: Callable[[], T]) -> T:
    """`read()`; its failure becomes one line, since Orbax, TensorStore and JSON each have errors of their own."""
    hooks = sys.excepthook, sys.unraisablehook
    sys.excepthook, sys.unraisablehook = _without_echoes(*hooks)
    try:
        result = read()
    except Exception as error:
        # The hooks stay: echoes can come as late as the end of the process.
        reason = (str(error).strip().splitlines() or ['no message'])[0][:100]
        raise InputError(
            f'{path}: checkpoint cannot be read ({type(error).__name__}: {reason}); '
            f'remove this step to go on from the one before'
        ) from None
    sys.excepthook, sys.unraisablehook = hooks
    return result


def stored_tree(path: Path) -> Any:
    """What an item of a step consists of: a tree of descriptions, each with name, shape and dtype.

    Raises:
        InputError: it is missing or cannot be read.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        tree = reading(path, lambda: checkpointer.metadata(path).item_metadata)
    if tree is None:
        # Orbax does not say which.
        raise InputError(
            f'{path}: missing in the checkpoint, or damaged; remove {path.parent} to go on from the one before'
        )
    return tree


def _handlers() -> dict[str, Any]:
    return {
        'params': ocp.StandardCheckpointHandler(),
        'ema': ocp.StandardCheckpointHandler(),
        'optimizer': ocp.StandardCheckpointHandler(),
        'progress': ocp.JsonCheckpointHandler(),
        'data': ocp.JsonCheckpointHandler(),
    }


def _without_echoes(excepthook: Callable, unraisablehook: Callable) -> tuple[Callable, Callable]:
    """Hooks that drop what Orbax lets its other threads print when one of many arrays cannot be read."""

    def is_echo(error: BaseException | None) -> bool:
        return any(words in str(error) for words in ('Event loop is closed', 'TensorStore'))

    def on_exception(kind: type, error: BaseException, trace: Any) -> None:
        if not is_echo(error):
            excepthook(kind, error, trace)

    def on_unraisable(unraisable: Any) -> None:
        if not is_echo(unraisable.exc_value):
            unraisablehook(unraisable)

    return on_exception, on_unraisable


def _check_tree(
    path: Path, abstract: Any, advice: str = 'choose another --workdir or the config it was trained with'
) -> None:
    """Compares names, shapes and types of what is stored with what is wanted: Orbax would cast types in silence."""
    stored, wanted = _leaves(stored_tree(path)), _leaves(abstract)
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            has = stored.get(name, 'nothing of that name')
            wants = wanted.get(name, 'nothing of that name')
            raise InputError(
                f'{path}: checkpoint of another model: {name} is {has} there, and {wants} in the config; {advice}'
            )


def _leaves(tree: Any) -> dict[str, str]:
    """Path → `shape type` of every array of a tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = (('.'.join(map(_key, path)), leaf) for path, leaf in leaves)
    return {name: f'{tuple(leaf.shape)} {jnp.dtype(leaf.dtype).name}' for name, leaf in names}


def _key(entry: Any) -> str:
    return str(getattr(entry, 'key', getattr(entry, 'name', getattr(entry, 'idx', entry))))
