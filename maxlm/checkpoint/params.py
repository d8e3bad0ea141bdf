"""The items of a step that are arrays: how they are cut, read and compared with what is wanted; parameters alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from maxlm.checkpoint import checksums
from maxlm.checkpoint.item_metadata import descriptions, item_metadata, key_name, translate_errors
from maxlm.errors import InputError
from maxlm.training.state import Params
from maxlm.workdir.step_dirs import to_path

# In the path of every array that is stacked over layers: [L, …].
STACK = 'blocks'


def restore_params(step_directory: epath.Path, abstract: Params, *, item: str = 'params') -> Params:
    """The parameters alone of one step's directory, placed as `abstract` says; `item` as `params_item` returns it.

    Raises:
        DamagedError: they cannot be read, or are not what was saved.
        InputError: they are those of another model.
    """
    path = to_path(step_directory) / item
    stored = checksums.read_checksums(path.parent)
    check_tree(path, abstract, stored=stored)
    params = read_arrays(path, abstract)
    if stored is not None:
        verify_items(path.parent, {item: params}, stored)
    return params


def params_item(step_directory: epath.Path) -> str:
    """The parameters of a step that are used: `ema`, their moving average, where the run kept one; else `params`."""
    return 'ema' if (step_directory / 'ema').is_dir() else 'params'


def check_params(step_directory: epath.Path, abstract: Params) -> None:
    """Compares what `params_item` names in a step with what is wanted, without reading the arrays.

    Raises:
        InputError: it is missing, or of another model.
    """
    advice = 'choose a checkpoint of this model, or the model of the checkpoint'
    path = to_path(step_directory) / params_item(step_directory)
    check_tree(path, abstract, advice, stored=checksums.read_checksums(path.parent))


def copy_params(params: Params) -> Params:
    """The same values in arrays of their own: the memory of an array that a state holds twice cannot be reused."""
    return jax.tree.map(jnp.copy, params)


def chunked_by_layer(tree: Any) -> Any:
    """What has Orbax store stacked arrays in pieces of one layer, so that a layer can be read without the others."""

    def arguments(path: tuple[Any, ...], leaf: Any) -> ocp.SaveArgs:
        stacked = leaf.shape and STACK in map(key_name, path)
        return ocp.SaveArgs(shard_axes=(0,) if stacked else ())

    return jax.tree_util.tree_map_with_path(arguments, tree)


def read_arrays(path: epath.Path, abstract: Any) -> Any:
    """An item of arrays, placed as `abstract` says; by each process alone, so that it can fail in one of them.

    Raises:
        DamagedError: it cannot be read.
    """
    handler = ocp.StandardCheckpointHandler()
    try:
        return translate_errors(path, lambda: handler.restore(path, args=ocp.args.StandardRestore(abstract)))
    finally:
        handler.close()


def verify_items(path: epath.Path, trees: Mapping[str, Any], stored: Mapping[str, checksums.Sums]) -> None:
    """Compares what was restored with the checksums of its step; all processes together.

    Args:
        path: directory of the step.
        trees: item → its arrays.
        stored: as `read_checksums` returns them.

    Raises:
        DamagedError: an item is not what was saved.
    """
    found = checksums.finish_checksums(trees, checksums.start_checksums(trees))
    for item, sums in found.items():
        checksums.verify_checksums(path / item, stored, sums)


def check_tree(
    path: epath.Path,
    abstract: Any,
    advice: str = 'choose another --workdir or the config it was trained with',
    *,
    stored: Mapping[str, checksums.Sums] | None,
) -> None:
    """Compares names, shapes and types of what is stored with what is wanted: Orbax would cast types in silence.

    Args:
        path: of an item of arrays.
        abstract: what is wanted.
        advice: the end of the message.
        stored: checksums of the step, where it has some: they tell damage from another model.

    Raises:
        DamagedError: the item is missing, or does not describe what was saved.
        InputError: it is of another model.
    """
    has, wants = descriptions(item_metadata(path)), descriptions(abstract)
    if stored is not None:
        checksums.check_descriptions(path, stored, has)
    for name in sorted(has.keys() | wants.keys()):
        if has.get(name) != wants.get(name):
            there = has.get(name, 'nothing of that name')
            wanted = wants.get(name, 'nothing of that name')
            raise InputError(
                f'{path}: checkpoint of another model: {name} is {there} there, and {wanted} in the config; {advice}'
            )
