"""Muon, which updates matrices with their orthogonalized momentum.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.

`optax.contrib.muon` is not used. Its bias correction changes the Nesterov mix of the first steps, and it has no
momentum warm-up. It also has no sharding constraints, without which XLA gathers all layers on every device.

Shapes: I inputs and O outputs of a matrix, M = min(I, O), W = max(I, O). Leading axes number layers and experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from maxlm.parallel.layout import Layout
from maxlm.training.optimizers.quantized_moments import init_moment, rounding_seed, update_moments

# Coefficients of the odd polynomial of degree 5 that is applied five times. Its slope at 0 is as large as possible, so
# small singular values grow fast. They end between about 0.7 and 1.2, which is accurate enough.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
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


def scale_by_muon(
    axes: Mapping[tuple[str, ...], tuple[str, ...]],
    *,
    momentum: float,
    warmup_steps: int,
    dtype: jnp.dtype,
    layout: Layout,
    moments: str,
) -> optax.GradientTransformation:
    """Returns the transformation of gradients into Muon's direction, before weight decay and learning rate.

    With gradient g and momentum m, an update computes m ← μ m + (1 - μ) g. The direction is
    √max(1, O/I) · orthogonal((1 - μ) g + μ m). μ rises linearly from 0.85 to `momentum` over `warmup_steps` updates.

    Args:
        axes: logical axes by path, at least of the parameters to which this is applied, which are stacks of kernels.
        momentum: μ after its warm-up.
        warmup_steps: number of updates of the momentum warm-up; 0 disables it.
        dtype: dtype of the matrix products.
        layout: layout of the parameters.
        moments: storage format of the momentum, as `optimizer.moment_dtype`.
    """
    rising = optax.linear_schedule(FIRST_MOMENTUM, momentum, warmup_steps)
    schedule = rising if warmup_steps else optax.constant_schedule(momentum)

    def init(params: optax.Params) -> MuonState:
        zeros = jax.tree.map(lambda param: init_moment(param, moments, signed=True), params)
        return MuonState(jnp.zeros((), jnp.int32), zeros)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        assert isinstance(state, MuonState)
        del params
        decay = cast(jax.Array, schedule(state.num_updates))

        def step(grad: jax.Array, moment: jax.Array) -> tuple[jax.Array, ...]:
            moment = decay * moment + (1 - decay) * grad
            return (1 - decay) * grad + decay * moment, moment

        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        directions, stored = [], []
        for index, ((path, grad), before) in enumerate(zip(leaves, tree.flatten_up_to(state.momentum), strict=True)):
            kernel_axes = axes[tuple(key.key for key in path)]
            seed = rounding_seed(state.num_updates, index)
            nesterov, moment = update_moments(step, grad, [before], seed=seed, axes=kernel_axes, layout=layout)
            directions.append(orthogonalize_kernels(nesterov, kernel_axes, dtype=dtype, layout=layout))
            stored.append(moment)
        return tree.unflatten(directions), MuonState(state.num_updates + 1, tree.unflatten(stored))

    return optax.GradientTransformation(init, update)


def orthogonalize_kernels(stack: jax.Array, axes: tuple[str, ...], *, dtype: jnp.dtype, layout: Layout) -> jax.Array:
    """Orthogonalizes the kernel of each layer, or of each expert of each layer, and scales it by √max(1, O/I).

    Each kernel is one matrix [I, O] and is processed by one device. The matrices are distributed over the devices that
    hold shards or copies of them, and padded with zero matrices if their number does not divide.

    Returns:
        A float32 array of the stack's shape.
    """
    num = num_stack_axes(axes)
    placements, parts = layout.spread_matrices(axes, num)
    shape, size = stack.shape[num:], stack.shape[num - 1]
    fan_in = math.prod(shape[: num_inputs(axes[num:])])
    fan_out = math.prod(shape) // fan_in

    # The dtype of the products halves the communication, and is accurate enough for Newton–Schulz.
    x = jnp.pad(stack.astype(dtype), [(0, -size % parts if axis == num - 1 else 0) for axis in range(stack.ndim)])
    for placement in placements:
        x = jax.lax.with_sharding_constraint(x, placement)
    x = newton_schulz(x.reshape(*x.shape[:num], fan_in, fan_out)).reshape(x.shape)
    for placement in reversed(placements):
        x = jax.lax.with_sharding_constraint(x, placement)
    x = jax.lax.slice_in_dim(x, 0, size, axis=num - 1)
    return x.astype(jnp.float32) * math.sqrt(max(1, fan_out / fan_in))


def newton_schulz(x_IO: jax.Array) -> jax.Array:
    """Maps matrices [..., I, O] of the form U S V to approximately U V in the dtype of x, as Jordan et al. do.

    Zero matrices remain zero.

    Examples:
        All singular values of the result are close to 1:

        >>> x_IO = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
        >>> newton_schulz(x_IO).round(2)
        Array([[0.71, 0.  , 0.  ],
               [0.  , 1.04, 0.  ]], dtype=float32)
    """
    tall = x_IO.shape[-2] > x_IO.shape[-1]
    x_MW: jax.Array = x_IO.mT if tall else x_IO
    # The Frobenius norm bounds the largest singular value. It is computed in float32 because it sums many squares.
    norm_11 = jnp.linalg.norm(x_MW.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x_MW = (x_MW / (norm_11 + 1e-7)).astype(x_IO.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_MM = x_MW @ x_MW.mT
        x_MW = a * x_MW + (b * gram_MM + c * gram_MM @ gram_MM) @ x_MW
    return x_MW.mT if tall else x_MW


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
