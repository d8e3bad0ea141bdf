"""Delayed scaling of FP8 products: scales from the largest elements of recent steps (TransformerEngine's recipe).

Each projection has three scaled arrays: its input, its kernel, and the gradient of its output. The largest elements of
the last `model.fp8_history` good steps are part of the training state. Scales are constant within a step, so they are
equal in all micro-batches and on all devices. Kernels are quantized once per step.

The model returns largest elements as the gradient of the scales, because that of a gradient is only known in the
backward pass.

Shapes: H steps of the history, P scaled arrays of all projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from maxlm.model.fp8.products import E4M3, delayed_scales, quantize
from maxlm.model.layers.linear import FP8_KERNEL, FP8_SCALES
from maxlm.model.layers.weight_only_quantization import KERNEL

Tree = Any  # nested dict of arrays
# Shape of the scales of each projection, [..., 3], by its path.
Projections = Mapping[tuple[str, ...], tuple[int, ...]]


class Fp8Inputs(NamedTuple):
    """Arrays that delayed scaling adds to the parameters of a step; without it, both trees are empty.

    Attributes:
        kernels: the kernel of each projection in E4M3 as bytes, `FP8_KERNEL`.
        scales: the scales of each projection, `FP8_SCALES`.
    """

    kernels: Tree
    scales: Tree


NO_FP8_INPUTS = Fp8Inputs({}, {})


def first_fp8_history(projections: Projections, length: int) -> jax.Array:
    """Returns the empty history [H, P] before the first step. The scales of that step are 1."""
    return jnp.zeros((length, len(ravel_pytree(_zeros(projections))[0])))


def fp8_inputs(params: Tree, projections: Projections, history_HP: jax.Array) -> tuple[Fp8Inputs, Tree]:
    """Returns the quantized kernels and the scales of a step, and the largest elements of the kernels.

    The largest elements have the structure of the scales, with 0 for the other arrays.
    """
    _, to_tree = ravel_pytree(_zeros(projections))
    scales = jax.tree.map(delayed_scales, to_tree(history_HP.max(axis=0)))
    kernels, maxima = {}, {}
    for path, shape in projections.items():
        kernel, scale = _at(params, path)[KERNEL], _at(scales, path)[FP8_SCALES][..., 1]
        axes = tuple(range(len(shape) - 1, kernel.ndim))
        kernels[path] = quantize(kernel, E4M3, jnp.expand_dims(scale, axes)).bits
        largest = jnp.max(jnp.abs(kernel), axis=axes)
        maxima[path] = jnp.stack([jnp.zeros_like(largest), largest, jnp.zeros_like(largest)], axis=-1)
    return Fp8Inputs(_nested(kernels, FP8_KERNEL), scales), _nested(maxima, FP8_SCALES)


def kernel_shardings(shardings: Tree, projections: Projections) -> Tree:
    """Returns the shardings of `Fp8Inputs.kernels`, which are those of the parameters."""
    return _nested({path: _at(shardings, path)[KERNEL] for path in projections}, FP8_KERNEL)


def record_maxima(history_HP: jax.Array, maxima: Tree, ok: jax.Array) -> jax.Array:
    """Returns the history after a step with these largest elements, which changes nothing if `ok` is False."""
    newest_P, _ = ravel_pytree(maxima)
    return jnp.where(ok, jnp.concatenate([history_HP[1:], newest_P[None]]), history_HP)


def with_fp8_inputs(params: Tree, inputs: Fp8Inputs) -> Tree:
    """Returns the parameters together with the arrays of delayed scaling."""

    def merge(tree: Tree, added: Tree) -> Tree:
        merged = dict(tree)
        for name, part in added.items():
            merged[name] = merge(tree.get(name, {}), part) if isinstance(part, Mapping) else part
        return merged

    return merge(merge(params, inputs.kernels), inputs.scales)


def has_fp8_inputs(params: Tree) -> bool:
    """Returns True if a tree comes from `with_fp8_inputs` with delayed scaling. Evaluation uses current scaling."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(params))
    return any(entry == jax.tree_util.DictKey(FP8_SCALES) for path in paths for entry in path)


def fp8_history_to_json(history_HP: jax.Array) -> list[list[float]]:
    """Returns the history as JSON values for a checkpoint, oldest step first. The conversion is exact."""
    values: list[list[float]] = jax.device_get(history_HP).tolist()
    return values


def fp8_history_from_json(stored: list[list[float]] | None, shape: tuple[int, ...]) -> jax.Array:
    """Returns the history [H, P] written by `fp8_history_to_json`, of which only the newest H steps are kept.

    It is empty if nothing is stored, as in a checkpoint of a run without delayed scaling, or for other projections.
    """
    history_HP = np.zeros(shape, np.float32)
    newest = np.array(stored or [], np.float32)[-shape[0] :]
    if newest.ndim == 2 and newest.shape[1] == shape[1]:
        history_HP[shape[0] - len(newest) :] = newest
    return jnp.asarray(history_HP)


def _zeros(projections: Projections) -> Tree:
    return _nested({path: jnp.zeros(shape) for path, shape in projections.items()}, FP8_SCALES)


def _at(tree: Tree, path: tuple[str, ...]) -> Tree:
    for name in path:
        tree = tree[name]
    return tree


def _nested(arrays: Mapping[tuple[str, ...], Any], name: str) -> Tree:
    """Returns the nested dict with an array called `name` at each path."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = array
    return tree
