"""Muon, which updates matrices with their orthogonalized momentum.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.

`optax.contrib.muon` is not used. Its bias correction changes the Nesterov mix of the first steps, and it has no
momentum warm-up. It also has no sharding constraints, without which XLA gathers all layers on every device.

Shapes: I inputs and O outputs of a matrix, W = max(I, O). Leading axes number layers and experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.model.parameters import names
from maxlm.parallel.layout import Layout
from maxlm.training.optimizers.orthogonalization import (
    divide_by_second_moment,
    equilibrate_rows,
    orthogonalize,
    renormalize,
)
from maxlm.training.optimizers.quantized_moments import init_moment, rounding_seed, update_moments

# Axes of a stack of kernels that number layers and experts.
STACK_AXES = ('layers', 'dense_layers', 'experts')
# Momentum at the start of its warm-up.
FIRST_MOMENTUM = 0.85


class MuonState(NamedTuple):
    """State of Muon.

    Attributes:
        num_updates: number of updates so far.
        momentum: momentum of each matrix, stored as `optimizer.moment_dtype`.
    """

    num_updates: jax.Array
    momentum: optax.Updates


class NorMuonState(NamedTuple):
    """State of Muon with `beta2`. Checkpoints without it do not have the third field, not even without arrays.

    Attributes:
        num_updates, momentum: those of `MuonState`.
        second_moment: second moments of each stack of matrices, [..., W] in float32.
    """

    num_updates: jax.Array
    momentum: optax.Updates
    second_moment: optax.Updates


class Rescaling(NamedTuple):
    """Method of orthogonalization, and changes of scale before and after it.

    Attributes:
        coefficients: `optimizer.muon_coefficients`.
        row_equilibration: `optimizer.muon_row_equilibration`.
        renormalize: `optimizer.muon_renormalize`.
        beta2: `optimizer.muon_beta2`.
    """

    coefficients: str = 'newton_schulz'
    row_equilibration: bool = False
    renormalize: bool = False
    beta2: float = 0.0


# Muon of Jordan et al. 2024.
PLAIN = Rescaling()


def momentum_schedule(
    momentum: float, *, warmup_steps: int, final: float = 0.0, decayed: optax.Schedule | None = None
) -> optax.Schedule:
    """Returns Muon's momentum by number of updates.

    It rises linearly from 0.85 to `momentum` over `warmup_steps` updates. Afterwards it approaches `final` linearly
    while the learning rate decays. A warm-up that reaches into the decay continues to its end.

    Args:
        momentum: momentum after the warm-up.
        warmup_steps: number of updates of the warm-up; 0 disables it.
        final: momentum at the end of the decay; 0 means `momentum`.
        decayed: completed fraction of the decay by number of updates; needed with `final`.

    Examples:
        >>> decayed = optax.linear_schedule(0.0, 1.0, 10, transition_begin=10)
        >>> schedule = momentum_schedule(0.97, warmup_steps=4, final=0.9, decayed=decayed)
        >>> [round(float(schedule(n)), 3) for n in (0, 2, 4, 10, 15, 20)]
        [0.85, 0.91, 0.97, 0.97, 0.935, 0.9]
    """
    rising = optax.linear_schedule(FIRST_MOMENTUM, momentum, warmup_steps)
    first = rising if warmup_steps else optax.constant_schedule(momentum)
    if not final:
        return first
    assert decayed is not None
    completed = decayed

    def schedule(count: Any) -> Any:
        return jnp.where(count < warmup_steps, first(count), momentum + (final - momentum) * completed(count))

    return schedule


def scale_by_muon(
    axes: Mapping[tuple[str, ...], tuple[str, ...]],
    *,
    momentum: optax.Schedule,
    dtype: jnp.dtype,
    layout: Layout,
    moments: str,
    rescaling: Rescaling = PLAIN,
) -> optax.GradientTransformation:
    """Returns the transformation of gradients into Muon's direction, before weight decay and learning rate.

    With gradient g and momentum m, an update computes m ← μ m + (1 - μ) g. The direction is
    √max(1, O/I) · orthogonal((1 - μ) g + μ m), where `rescaling` modifies the orthogonalization.

    Args:
        axes: logical axes by path, at least of the parameters to which this is applied, which are stacks of kernels.
        momentum: μ by number of updates, see `momentum_schedule`.
        dtype: dtype of the matrix products.
        layout: layout of the parameters.
        moments: storage format of the momentum, as `optimizer.moment_dtype`.
        rescaling: method of orthogonalization, and changes of scale.
    """

    def init(params: optax.Params) -> MuonState | NorMuonState:
        zeros = jax.tree.map(lambda param: init_moment(param, moments, signed=True), params)

        def zero_moment(path: tuple[Any, ...], param: jax.Array) -> jax.Array:
            return jnp.zeros(second_moment_shape(param.shape, axes[names(path)]), jnp.float32)

        state = MuonState(jnp.zeros((), jnp.int32), zeros)
        if not rescaling.beta2:
            return state
        return NorMuonState(*state, jax.tree_util.tree_map_with_path(zero_moment, params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState | NorMuonState]:
        assert isinstance(state, (MuonState, NorMuonState))
        del params
        decay = cast(jax.Array, momentum(state.num_updates))

        def step(grad: jax.Array, moment: jax.Array) -> tuple[jax.Array, ...]:
            moment = decay * moment + (1 - decay) * grad
            return (1 - decay) * grad + decay * moment, moment

        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        second: Any = [None] * len(leaves)
        if isinstance(state, NorMuonState):
            second = tree.flatten_up_to(state.second_moment)
        before = zip(leaves, tree.flatten_up_to(state.momentum), second, strict=True)
        after = []
        for index, ((path, grad), moment, squares) in enumerate(before):
            kernel_axes = axes[names(path)]
            seed = rounding_seed(state.num_updates, index)
            nesterov, moment = update_moments(step, grad, [moment], seed=seed, axes=kernel_axes, layout=layout)
            direction, squares = orthogonalize_kernels(
                nesterov, squares, kernel_axes, rescaling=rescaling, dtype=dtype, layout=layout
            )
            after.append((direction, moment, squares))
        directions, stored, second = zip(*after, strict=True)
        new = MuonState(state.num_updates + 1, tree.unflatten(stored))
        with_second = NorMuonState(*new, tree.unflatten(second)) if rescaling.beta2 else new
        return tree.unflatten(directions), with_second

    return optax.GradientTransformation(init, update)


def orthogonalize_kernels(
    stack: jax.Array,
    second_moment: jax.Array | None,
    axes: tuple[str, ...],
    *,
    rescaling: Rescaling,
    dtype: jnp.dtype,
    layout: Layout,
) -> tuple[jax.Array, jax.Array | None]:
    """Orthogonalizes the kernel of each layer, or of each expert of each layer, and scales it by `update_scale`.

    Each kernel is one matrix [I, O] and is processed by one device. The matrices are distributed over the devices that
    hold shards or copies of them, and padded with zero matrices if their number does not divide.

    Args:
        stack: the kernels.
        second_moment: their second moments, of shape `second_moment_shape`; None without `rescaling.beta2`.
        axes: logical axes of the kernels.
        rescaling: method of orthogonalization, and changes of scale.
        dtype: dtype of the matrix products.
        layout: layout of the kernels.

    Returns:
        A float32 array of the stack's shape, and the new second moments.
    """
    num = num_stack_axes(axes)
    placements, parts = layout.spread_matrices(axes, num)
    size = stack.shape[num - 1]
    fan_in, fan_out = matrix_shape(stack.shape, axes)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, -size % parts if axis == num - 1 else 0) for axis in range(x.ndim)])

    # The dtype of the products halves the communication, and is accurate enough for Newton–Schulz.
    x = pad(stack.astype(dtype))
    for placement in placements:
        x = jax.lax.with_sharding_constraint(x, placement)
    x_IO = x.reshape(*x.shape[:num], fan_in, fan_out)
    if rescaling.row_equilibration:
        x_IO = equilibrate_rows(x_IO)
    x_IO = orthogonalize(x_IO, rescaling.coefficients)
    if rescaling.renormalize:
        x_IO = renormalize(x_IO)
    if second_moment is not None:
        # The second moments of a matrix go to the device that processes it. They are small, so each way passes through
        # copies on all devices; XLA would log a warning for a direct way.
        spread = NamedSharding(layout.mesh, PartitionSpec(*placements[-1].spec[:num]))
        copies = jax.lax.with_sharding_constraint(second_moment, layout.named())
        moment_W = jax.lax.with_sharding_constraint(pad(copies), spread)
        x_IO, moment_W = divide_by_second_moment(x_IO, moment_W, beta2=rescaling.beta2)
        copies = jax.lax.with_sharding_constraint(moment_W, layout.named())
        second_moment = jax.lax.slice_in_dim(copies, 0, size, axis=num - 1)
    x = x_IO.reshape(x.shape)
    for placement in reversed(placements):
        x = jax.lax.with_sharding_constraint(x, placement)
    x = jax.lax.slice_in_dim(x, 0, size, axis=num - 1)
    return x.astype(jnp.float32) * update_scale(stack.shape, axes), second_moment


def update_scale(shape: tuple[int, ...], axes: tuple[str, ...]) -> float:
    """Returns √max(1, O/I), the factor of the updates of a stack of kernels."""
    fan_in, fan_out = matrix_shape(shape, axes)
    return math.sqrt(max(1, fan_out / fan_in))


def matrix_shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, int]:
    """Returns I and O of the kernels of a stack."""
    num = num_stack_axes(axes)
    fan_in = math.prod(shape[num : num + num_inputs(axes[num:])])
    return fan_in, math.prod(shape[num:]) // fan_in


def second_moment_shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the shape [..., W] of the second moments of a stack of kernels."""
    return *shape[: num_stack_axes(axes)], max(matrix_shape(shape, axes))


def num_stack_axes(axes: tuple[str, ...]) -> int:
    """Returns the number of leading axes of a stack of kernels that number layers and experts."""
    return next(index for index, axis in enumerate(axes) if axis not in STACK_AXES)


def num_inputs(axes: tuple[str, ...]) -> int:
    """Returns the number of leading axes of a kernel that are contracted, from the names of its axes.

    Each matrix reads or writes the residual stream, so its input or its output is the single axis `embed`. In an expert
    this axis is `expert_embed`, and in the gate of a value embedding it is `gate_channels`.
    """
    reads, writes = (axis in ('embed', 'expert_embed', 'gate_channels') for axis in (axes[0], axes[-1]))
    assert reads != writes, f'cannot tell inputs from outputs: {axes}'
    return 1 if reads else len(axes) - 1
