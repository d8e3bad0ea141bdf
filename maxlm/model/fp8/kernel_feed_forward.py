"""A feed-forward layer in 8-bit floats, whose activation the kernel computes that rounds its result.

The output of the activation is never stored in 16 bits, and neither are the gradients of its inputs. The values are
those of separate projections (`maxlm.model.fp8.kernel_products.product`) and activation.

Shapes: R rows, D width of the model, F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from maxlm.model.fp8.kernel_products import (
    KeptInput,
    KeptProjection,
    Projection,
    RoundedInput,
    apply,
    gradients_of,
    keep,
    rounded_input,
)
from maxlm.model.fp8.products import E4M3
from maxlm.model.fp8.rounding_kernel import Fp8Rounding, round_matrices
from maxlm.parallel.partitioning import Partitioning

# Activations that Triton does not compile.
UNSUPPORTED = ('gelu', 'geglu')


class FeedForwardPlan(NamedTuple):
    """Static properties of a feed-forward layer.

    Attributes:
        activation: elementwise function of the outputs of the first projections.
        partitioning: partitioning of the model.
    """

    activation: Callable[..., jax.Array]
    partitioning: Partitioning


class _Kept(NamedTuple):
    """Arrays for the backward pass; see `feed_forward`. `inputs_RF` are the inputs of the activation."""

    x: KeptInput
    hidden: KeptInput
    inputs_RF: list[jax.Array]
    into: list[KeptProjection]
    down: KeptProjection


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def feed_forward(
    x_RD: jax.Array, into: list[Projection], down: Projection, rounded: RoundedInput, plan: FeedForwardPlan
) -> jax.Array:
    """Returns down(activation(into(x))), [R, D], in the dtype of x.

    Args:
        x_RD: the input, which receives the gradient; its values are not used.
        into: projections of the input, D → F.
        down: projection F → D.
        rounded: the input in 8-bit floats.
        plan: properties of the layer.
    """
    return _forward(x_RD, into, down, rounded, plan)[0]


def _forward(
    x_RD: jax.Array, into: list[Projection], down: Projection, rounded: RoundedInput, plan: FeedForwardPlan
) -> tuple[jax.Array, _Kept]:
    inputs_RF = [apply(projection, rounded.codes, x_RD.dtype) for projection in into]

    def activate(*tiles: jax.Array) -> tuple[jax.Array]:
        return (plan.activation(*tiles),)

    (found,) = round_matrices(inputs_RF, [down.scales[0]], [Fp8Rounding(E4M3)], plan.partitioning, activate)
    hidden = rounded_input(found)
    y_RD = apply(down, hidden.codes, x_RD.dtype)
    return y_RD, _Kept(rounded.kept, hidden.kept, inputs_RF, list(map(keep, into)), keep(down))


def _backward(
    plan: FeedForwardPlan, kept: _Kept, gradient_RD: jax.Array
) -> tuple[jax.Array, list[Projection], Projection, None]:
    dtype, down = gradient_RD.dtype, kept.down
    (found,) = round_matrices([gradient_RD], [down.scales[2]], [down.rounding], plan.partitioning)
    of_hidden_RF, of_down = gradients_of(found, down, kept.hidden, dtype)

    def pull(*tiles: jax.Array) -> tuple[jax.Array, ...]:
        *inputs, gradient = tiles
        gradients: tuple[jax.Array, ...] = jax.vjp(plan.activation, *inputs)[1](gradient)
        return gradients

    scales, roundings = [p.scales[2] for p in kept.into], [p.rounding for p in kept.into]
    matrices = round_matrices([*kept.inputs_RF, of_hidden_RF], scales, roundings, plan.partitioning, pull)
    of_x, of_into = zip(
        *(gradients_of(found, p, kept.x, dtype) for found, p in zip(matrices, kept.into, strict=True)), strict=True
    )
    total_RD = of_x[-1]
    for of_x_RD in of_x[-2::-1]:
        # In this order, cuBLAS adds within the product, as in `maxlm.model.layers.linear.fused_apply`.
        total_RD = of_x_RD + total_RD
    return total_RD, list(of_into), of_down, None


feed_forward.defvjp(_forward, _backward)
