"""Optimizers of the user: functions that return an optax transformation, and checks of the transformation."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.user_function import call_function, load_function
from maxlm.errors import InputError
from maxlm.parallel.layout import Layout
from maxlm.training.optimizers.muon import num_inputs, num_stack_axes

KEY = 'optimizer.name'
# Optimizers of maxlm that are written as those of a user.
SHIPPED = {'soap': 'maxlm.training.optimizers.soap:soap'}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Description of a parameter: a leaf of the tree that an optimizer of the user receives.

    Attributes:
        name: dotted path, such as `blocks.attention.query.kernel`.
        shape: shape of the array. Parameters of blocks are stacked: layers, then experts, precede the other axes.
        dtype: dtype of the array.
        axes: logical axis of each dimension, such as `layers`, `embed` and `ffn`.
        kind: matrix (of a block), router, adapter, table, head or vector, as `kind_of`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]
    kind: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def input_axes(self) -> tuple[int, ...]:
        """Returns the dimensions that a matrix contracts. The kind must be `matrix`."""
        start = num_stack_axes(self.axes)
        return tuple(range(start, start + num_inputs(self.axes[start:])))

    @property
    def output_axes(self) -> tuple[int, ...]:
        """Returns the dimensions of the outputs of a matrix. The kind must be `matrix`."""
        return tuple(range(self.input_axes[-1] + 1, len(self.axes)))


def user_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, params: Any, layout: Layout | None = None
) -> optax.GradientTransformation:
    """Returns the optimizer of the function `optimizer.name`.

    Args:
        config: section `optimizer` of the config.
        schedule: learning rate by number of updates.
        params: tree of the trainable parameters, with a `Parameter` in place of each array.
        layout: layout of the state, for SHIPPED optimizers; None = one device.

    Raises:
        InputError: the function cannot be imported, fails or does not return an optimizer.
    """
    function = load_function(
        SHIPPED.get(config.name, config.name), kind=KEY, arguments=('config', 'learning_rate', 'params')
    )
    if config.name in SHIPPED:
        function = functools.partial(function, layout=layout)
    optimizer = call_function(function, config, schedule, params, name=config.name, kind=KEY)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise InputError(
            f'{KEY} {config.name}: returned {type(optimizer).__name__}; it must return an optax.GradientTransformation'
        )
    return optimizer


def check_optimizer(optimizer: optax.GradientTransformation, params: Any, *, name: str) -> Any:
    """Checks that an optimizer can train, resume and be saved, by tracing an update.

    Args:
        optimizer: optimizer that maxlm did not make.
        params: shapes and dtypes of the trainable parameters.
        name: name of the optimizer for messages.

    Returns:
        The shapes and dtypes of its state.

    Raises:
        InputError: the optimizer fails, its state has values that no checkpoint contains, or an update changes a shape
            or a dtype.
    """
    where = f'{KEY} {name}'
    state = call_function(jax.eval_shape, optimizer.init, params, name=name, kind=KEY)
    for path, leaf in jax.tree.leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise InputError(f'{where}: state{_text(path)} is a key; use jax.random.key_data(key)')
        if not leaf.size:
            raise InputError(f'{where}: state{_text(path)} has no elements; use None or optax.EmptyState()')
    updates, after = call_function(jax.eval_shape, optimizer.update, params, state, params, name=name, kind=KEY)
    for what, old, new in (('updates', params, updates), ('state', state, after)):
        if difference := _difference(old, new, dtypes=what == 'state'):
            raise InputError(f'{where}: the update changes {what}{difference}; they must stay the same')
    return state


def _difference(old: Any, new: Any, *, dtypes: bool) -> str:
    """Returns the first difference of two trees of abstract arrays; '' if there is none."""
    before, after = (str(jax.tree.structure(tree)) for tree in (old, new))
    if before != after:
        return f' from {_start(before)} to {_start(after)}'
    for (path, one), other in zip(jax.tree.leaves_with_path(old), jax.tree.leaves(new), strict=True):
        if one.shape != other.shape or (dtypes and one.dtype != other.dtype):
            return f'{_text(path)} from {one.dtype}{list(one.shape)} to {other.dtype}{list(other.shape)}'
    return ''


def _text(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path)


def _start(text: str) -> str:
    return text if len(text) <= 200 else f'{text[:200]}…'
