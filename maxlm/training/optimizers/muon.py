"""Muon: matrices move by their orthogonalized momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

Not `optax.contrib.muon`: it corrects the momentum's bias, which changes the Nesterov mix of the first steps, knows no
momentum warm-up, and leaves to XLA where matrices lie, which then gathers all layers on every device.

Shapes: L layers, I inputs and O outputs of a matrix, M the smaller and W the wider of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlm.parallel.layout import Layout
from maxlm.training.optimizers.quantized_moments import init_moment, rounding_seed, update_moments

# Of the odd polynomial of degree 5 that is applied five times: as steep at 0 as goes, so that small singular values
# grow fast. They end near 1, between about 0.7 and 1.2, which is good enough.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# Where the momentum's warm-up begins.
FIRST_MOMENTUM = 0.85


class MuonState(NamedTuple):
    """Updates so far, and the momentum of every matrix as `optimizer.moment_dtype` says."""

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
    """The direction of Muon, before weight decay and learning rate.

    With gradient g and momentum m of update n = 0, 1, …, μ rising from 0.85 to `momentum` over `warmup_steps`:
    m ← μ m + (1 - μ) g, and the direction is √max(1, O/I) · orthogonal((1 - μ) g + μ m).

    Args:
        axes: by path, the logical axes of (at least) every parameter that this is applied to: a stack of kernels.
        momentum: μ after its warm-up.
        warmup_steps: updates that its warm-up takes; 0 = none.
        dtype: of the products of matrices.
        layout: where parameters lie.
        moments: how the momentum is stored, as `optimizer.moment_dtype`.
    """
    rising = optax.linear_schedule(FIRST_MOMENTUM, momentum, warmup_steps)
    schedule = rising if warmup_steps else optax.constant_schedule(momentum)

    def init(params: optax.Params) -> MuonState:
        zeros = jax.tree.map(lambda param: init_moment(param, moments, signed=True), params)
        return MuonState(jnp.zeros((), jnp.int32), zeros)

    def update(grads: optax.Updates, state: MuonState, params: Any = None) -> tuple[optax.Updates, MuonState]:
        del params
        decay = schedule(state.num_updates)

        def step(grad: jax.Array, moment: jax.Array) -> tuple[jax.Array, ...]:
            moment = decay * moment + (1 - decay) * grad
            return (1 - decay) * grad + decay * moment, moment

        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(grads)
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
    """Every layer's kernel as one matrix [I, O], orthogonalized and times √max(1, O/I); float32, of the stack's shape.

    Whole matrices are worked on, each by one device: layers are spread over the devices that hold pieces of them (or
    copies), filled up with matrices of zeros where they do not divide.
    """
    assert axes[0] == 'layers', axes
    placements, parts = layout.spread_layers(axes)
    shape, layers = stack.shape[1:], stack.shape[0]
    fan_in = math.prod(shape[: num_inputs(axes[1:])])
    fan_out = math.prod(shape) // fan_in

    # In the type of the products, so that half as much travels; Newton–Schulz is as good for it.
    x = jnp.pad(stack.astype(dtype), [(0, -layers % parts)] + [(0, 0)] * len(shape))
    for placement in placements:
        x = jax.lax.with_sharding_constraint(x, placement)
    x = newton_schulz(x.reshape(-1, fan_in, fan_out)).reshape(-1, *shape)
    for placement in reversed(placements):
        x = jax.lax.with_sharding_constraint(x, placement)
    return x[:layers].astype(jnp.float32) * math.sqrt(max(1, fan_out / fan_in))


def newton_schulz(x_LIO: jax.Array) -> jax.Array:
    """U S V ↦ about U V of every matrix, in x's type; a matrix of zeros stays one. Computed as Jordan et al. do."""
    tall = x_LIO.shape[1] > x_LIO.shape[2]
    x_LMW = x_LIO.mT if tall else x_LIO
    # The Frobenius norm bounds the largest singular value. In float32, since it sums very many squares.
    norm_L11 = jnp.linalg.norm(x_LMW.astype(jnp.float32), axis=(1, 2), keepdims=True)
    x_LMW = (x_LMW / (norm_L11 + 1e-7)).astype(x_LIO.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_LMM = x_LMW @ x_LMW.mT
        x_LMW = a * x_LMW + (b * gram_LMM + c * gram_LMM @ gram_LMM) @ x_LMW
    return x_LMW.mT if tall else x_LMW


def num_inputs(axes: tuple[str, ...]) -> int:
    """How many leading axes of a kernel are contracted, by the names of its axes.

    Every matrix of a block reads the residual stream or writes to it: one of its sides is the axis `embed` alone.
    """
    assert (axes[0] == 'embed') != (axes[-1] == 'embed'), f'cannot tell inputs from outputs: {axes}'
    return 1 if axes[0] == 'embed' else len(axes) - 1
