"""Reads, checks and restores the array items of a step, and the parameters alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from maxlm.checkpoint import checksums
from maxlm.checkpoint.item_metadata import descriptions, item_metadata, key_name, translate_errors
from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.model.mtp import MTP
from maxlm.model.parameters import SCORE_KERNEL, VALUE_HEAD
from maxlm.training.state import Params
from maxlm.workdir.step_dirs import to_path

HEAD = 'head.kernel'
# Path component of every array that is stacked over layers: [L, …].
STACK = 'blocks'
# Modules that only training uses, by the first name of their parameters.
TRAINING_MODULES = {
    MTP: 'the modules of multi-token prediction, which only training with model.mtp_depth uses',
    VALUE_HEAD: 'the value head, which only training with grpo.advantage_estimator=gae uses',
}


def restore_params(
    step_directory: epath.Path, abstract: Params, *, item: str = 'params', ignored: Collection[str] = ()
) -> Params:
    """Restores the parameters of a step, sharded like `abstract`. `item` is the result of `params_item`.

    The step may also contain the arrays with the names `ignored`, which are not read.

    Raises:
        CorruptCheckpointError: the parameters cannot be read, or differ from the saved ones.
        InputError: the parameters are those of another model.
    """
    path = to_path(step_directory) / item
    stored = checksums.read_checksums(path.parent)
    unused = check_tree(path, abstract, stored=stored, may_have_modules=True, ignored=ignored)
    log_unused_modules(path, unused)
    params = read_arrays(path, abstract, is_complete=not unused)
    if stored is not None:
        used = {name: text for name, text in stored.get(item, {}).items() if name not in unused}
        verify_items(path.parent, {item: params}, {**stored, item: used} if item in stored else stored)
    return params


def unused_modules(stored: Iterable[str], expected: Iterable[str] = ()) -> set[str]:
    """Returns the names of stored parameters of `TRAINING_MODULES` that the expected parameters lack."""
    used = {name.partition('.')[0] for name in expected}
    return {name for name in stored if is_training_module(name) and name.partition('.')[0] not in used}


def unused_params(path: Any, stored: Collection[str], expected: Iterable[str], model: ModelConfig) -> set[str]:
    """Returns the names of stored parameters that a model does not use: `unused_modules`, and a reward model's head.

    A reward model has no head of the vocabulary.

    Args:
        path: path of the stored parameters.
        stored: their names.
        expected: names of the parameters of the model.
        model: config of the model that starts with them.

    Raises:
        InputError: the stored parameters are those of a reward model, and the model is a language model.
    """
    if SCORE_KERNEL in stored and not model.reward_head:
        raise InputError(
            f'{path}: is a reward model, which predicts no tokens; set train.init_from to a language model, or set '
            'train.objective=reward'
        )
    return unused_modules(stored, expected) | ({HEAD} & {*stored} if model.reward_head else set())


def is_training_module(name: str) -> bool:
    """Returns True if the parameter with this dotted name belongs to one of `TRAINING_MODULES`."""
    return name.partition('.')[0] in TRAINING_MODULES


def log_unused_modules(path: Any, unused: Iterable[str]) -> None:
    """Logs which modules of an item are not read, from the names of its unused parameters."""
    found = {name.partition('.')[0] for name in unused}
    if texts := [text for name, text in TRAINING_MODULES.items() if name in found]:
        logger.info(f'{path}: left out {" and ".join(texts)}')


def without_training_modules(model: ModelConfig) -> ModelConfig:
    """Returns the model config without the modules that only training uses."""
    return dataclasses.replace(model, mtp_depth=0, value_head=False)


def params_item(step_directory: epath.Path) -> str:
    """Returns the item with the parameters to use: `ema` (moving average) if the run kept one, else `params`."""
    return 'ema' if (step_directory / 'ema').is_dir() else 'params'


def check_params(step_directory: epath.Path, abstract: Params, ignored: Collection[str] = ()) -> None:
    """Compares the item `params_item` of a step with `abstract`, except for the names `ignored`, without reading it.

    Raises:
        InputError: the item is missing, or belongs to another model.
    """
    advice = 'choose a checkpoint of this model, or configure the model of the checkpoint'
    path = to_path(step_directory) / params_item(step_directory)
    sums = checksums.read_checksums(path.parent)
    check_tree(path, abstract, advice, stored=sums, may_have_modules=True, ignored=ignored)


def copy_params(params: Params) -> Params:
    """Copies the arrays. A buffer that a state contains twice cannot be donated."""
    return jax.tree.map(jnp.copy, params)


def chunked_by_layer(tree: Any) -> Any:
    """Returns Orbax save arguments that store stacked arrays in chunks of one layer, so layers can be read alone."""

    def arguments(path: tuple[Any, ...], leaf: Any) -> ocp.SaveArgs:
        stacked = leaf.shape and STACK in map(key_name, path)
        return ocp.SaveArgs(shard_axes=(0,) if stacked else ())

    return jax.tree_util.tree_map_with_path(arguments, tree)


def read_arrays(path: epath.Path, abstract: Any, *, is_complete: bool = True) -> Any:
    """Reads an item of arrays, sharded like `abstract`. Each process reads independently, so one process may fail.

    If `is_complete` is False, the item may contain other arrays, which are not read.

    Raises:
        CorruptCheckpointError: the item cannot be read.
    """
    handler: Any = ocp.StandardCheckpointHandler() if is_complete else ocp.PyTreeCheckpointHandler()
    arguments: ocp.args.CheckpointArgs = ocp.args.StandardRestore(abstract)
    if not is_complete:
        placed = ocp.checkpoint_utils.construct_restore_args(abstract)
        arguments = ocp.args.PyTreeRestore(abstract, restore_args=placed, partial_restore=True)
    try:
        return translate_errors(path, lambda: handler.restore(path, args=arguments))
    finally:
        handler.close()


def verify_items(path: epath.Path, trees: Mapping[str, Any], stored: Mapping[str, checksums.Sums]) -> None:
    """Compares the restored items of a step with their checksums. All processes call it together.

    Args:
        path: directory of the step.
        trees: item → its arrays.
        stored: result of `read_checksums`.

    Raises:
        CorruptCheckpointError: an item differs from the saved one.
        DeviceError: the replicas of an array differ.
    """
    occasion = f'{path} cannot be restored'
    found = checksums.finish_checksums(trees, checksums.start_checksums(trees), occasion=occasion)
    for item, sums in found.items():
        checksums.verify_checksums(path / item, stored, sums)


def check_tree(
    path: epath.Path,
    abstract: Any,
    advice: str = 'choose another --workdir or the config it was trained with',
    *,
    stored: Mapping[str, checksums.Sums] | None,
    may_have_modules: bool = False,
    ignored: Collection[str] = (),
) -> set[str]:
    """Compares stored names, shapes and dtypes with the expected ones. Orbax would silently cast dtypes.

    Args:
        path: path of an item of arrays.
        abstract: expected tree.
        advice: remedy at the end of the error message.
        stored: checksums of the step, if any. They distinguish corruption from another model.
        may_have_modules: the item may contain `TRAINING_MODULES` that `abstract` lacks.
        ignored: names of other arrays that the item may contain and `abstract` lacks.

    Returns:
        The names of the stored arrays that `abstract` lacks.

    Raises:
        CorruptCheckpointError: the item is missing, or its descriptions differ from the saved ones.
        InputError: the item belongs to another model.
    """
    has, wants = descriptions(item_metadata(path)), descriptions(abstract)
    if stored is not None:
        checksums.check_descriptions(path, stored, has)
    unused = {*ignored} & has.keys()
    if may_have_modules:
        unused |= unused_modules(has, wants)
    for name in sorted((has.keys() | wants.keys()) - unused):
        if has.get(name) != wants.get(name):
            found = has.get(name, 'missing')
            expected = wants.get(name, 'missing')
            raise InputError(
                f'{path}: checkpoint of another model: {name} is {found} in the checkpoint but {expected} in the '
                f'config; {advice}'
            )
    return unused
