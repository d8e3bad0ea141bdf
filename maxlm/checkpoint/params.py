"""Reads, checks and restores the array items of a step, and the parameters alone."""

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

# Path component of every array that is stacked over layers: [L, …].
STACK = 'blocks'


def restore_params(step_directory: epath.Path, abstract: Params, *, item: str = 'params') -> Params:
    """Restores the parameters of a step, sharded like `abstract`. `item` is the result of `params_item`.

    Raises:
        CorruptCheckpointError: the parameters cannot be read, or differ from the saved ones.
        InputError: the parameters are those of another model.
    """
    path = to_path(step_directory) / item
    stored = checksums.read_checksums(path.parent)
    check_tree(path, abstract, stored=stored)
    params = read_arrays(path, abstract)
    if stored is not None:
        verify_items(path.parent, {item: params}, stored)
    return params


def params_item(step_directory: epath.Path) -> str:
    """Returns the item with the parameters to use: `ema` (moving average) if the run kept one, else `params`."""
    return 'ema' if (step_directory / 'ema').is_dir() else 'params'


def check_params(step_directory: epath.Path, abstract: Params) -> None:
    """Compares the item `params_item` of a step with `abstract`, without reading the arrays.

    Raises:
        InputError: the item is missing, or belongs to another model.
    """
    advice = 'choose a checkpoint of this model, or configure the model of the checkpoint'
    path = to_path(step_directory) / params_item(step_directory)
    check_tree(path, abstract, advice, stored=checksums.read_checksums(path.parent))


def copy_params(params: Params) -> Params:
    """Copies the arrays. A buffer that a state contains twice cannot be donated."""
    return jax.tree.map(jnp.copy, params)


def chunked_by_layer(tree: Any) -> Any:
    """Returns Orbax save arguments that store stacked arrays in chunks of one layer, so layers can be read alone."""

    def arguments(path: tuple[Any, ...], leaf: Any) -> ocp.SaveArgs:
        stacked = leaf.shape and STACK in map(key_name, path)
        return ocp.SaveArgs(shard_axes=(0,) if stacked else ())

    return jax.tree_util.tree_map_with_path(arguments, tree)


def read_arrays(path: epath.Path, abstract: Any) -> Any:
    """Reads an item of arrays, sharded like `abstract`. Each process reads independently, so one process may fail.

    Raises:
        CorruptCheckpointError: the item cannot be read.
    """
    handler = ocp.StandardCheckpointHandler()
    try:
        return translate_errors(path, lambda: handler.restore(path, args=ocp.args.StandardRestore(abstract)))
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
    """Compares stored names, shapes and dtypes with the expected ones. Orbax would silently cast dtypes.

    Args:
        path: path of an item of arrays.
        abstract: expected tree.
        advice: remedy at the end of the error message.
        stored: checksums of the step, if any. They distinguish corruption from another model.

    Raises:
        CorruptCheckpointError: the item is missing, or its descriptions differ from the saved ones.
        InputError: the item belongs to another model.
    """
    has, wants = descriptions(item_metadata(path)), descriptions(abstract)
    if stored is not None:
        checksums.check_descriptions(path, stored, has)
    for name in sorted(has.keys() | wants.keys()):
        if has.get(name) != wants.get(name):
            there = has.get(name, 'missing')
            wanted = wants.get(name, 'missing')
            raise InputError(
                f'{path}: checkpoint of another model: {name} is {there} in the checkpoint but {wanted} in the config; '
                f'{advice}'
            )
