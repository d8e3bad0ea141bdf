"""SOAP: Adam in the eigenbases of Shampoo (Vyas et al. 2024, arXiv 2409.11321).

For a matrix with gradient G [I, O], update t = 1, 2, … computes algorithm 3 of the paper with Adam's bias correction:

    M ← β₁ M + (1 - β₁) G                                     G' = Q_Lᵀ G Q_R,  M' = Q_Lᵀ M Q_R
    V ← β₂ V + (1 - β₂) G'²                                   N = Q_L (M' / (√V + ε)) Q_Rᵀ, the direction
    L ← β₂ L + (1 - β₂) G Gᵀ,  R ← β₂ R + (1 - β₂) Gᵀ G       Q ← qr(L Q), qr(R Q) in every `frequency`-th update

Update 0 only computes L, R and their eigenvectors, and its direction is zero, as in the authors' code. The authors also
sort the eigenvectors by eigenvalue, which changes no direction but needs V to be permuted; this file does not.

Each device updates its share of the matrices. They are complete before the decompositions, which then need no
communication. With sharded matrices, XLA would gather the operands in the branch that contains the decompositions. On a
CPU, the devices gather them in different orders, and wait for each other.

It is written as an optimizer of a user (`maxlm.training.optimizers.user_optimizer`), so that placement, planned memory
and checkpoints of its state need no code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.model.parameters import names
from maxlm.parallel.layout import Layout
from maxlm.training.optimizers.muon import matrix_shape, num_stack_axes
from maxlm.training.optimizers.parameter_groups import DECAYED
from maxlm.training.optimizers.state_placement import state_axes
from maxlm.training.optimizers.user_optimizer import Parameter

# Updates between two computations of the eigenbases, as in the paper.
FREQUENCY = 10
# Sides of a matrix that are longer than this have the identity as basis and no preconditioner.
MAX_DIM = 4096
# Mesh axes over which the matrices of a stack are distributed. Links between replicas are too slow.
_SPREAD = ('fsdp', 'expert', 'context', 'tensor', 'data')
_dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class SoapState(NamedTuple):
    """State of SOAP.

    Attributes:
        step: number of updates so far.
        mu, nu: first moments, and second moments in the eigenbases, of the shapes of the parameters.
        factors: L [..., I, I] and R [..., O, O] of each stack of matrices; None for sides longer than the maximum.
        bases: eigenvectors of `factors`, as columns.
    """

    step: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    factors: Any
    bases: Any


def soap(
    config: OptimizerConfig,
    learning_rate: optax.Schedule,
    params: Any,
    *,
    frequency: int = FREQUENCY,
    max_dim: int = MAX_DIM,
    layout: Layout | None = None,
) -> optax.GradientTransformation:
    """Returns SOAP for the matrices of the blocks and Adam for all other parameters, with decoupled weight decay.

    Args:
        config: section `optimizer` of the config.
        learning_rate: learning rate by number of updates.
        params: tree of `Parameter`.
        frequency: number of updates from one computation of the eigenbases to the next.
        max_dim: longest side of a matrix with a preconditioner.
        layout: layout of the parameters and of the state; None = one device.
    """
    described = jax.tree.leaves_with_path(params)
    matrices = {names(path): param for path, param in described if param.kind == 'matrix'}
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    rotated = scale_by_soap(
        matrices,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.eps,
        frequency=frequency,
        max_dim=max_dim,
        layout=layout,
    )
    kinds = jax.tree.map(lambda param: 'matrix' if param.kind == 'matrix' else 'other', params)
    decayed = jax.tree.map(lambda param: param.kind in DECAYED[config.weight_decay_mask], params)
    return optax.chain(
        optax.partition({'matrix': rotated, 'other': adam}, kinds),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_soap(
    matrices: Mapping[tuple[str, ...], Parameter],
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    frequency: int,
    max_dim: int,
    layout: Layout | None,
) -> optax.GradientTransformation:
    """Returns the transformation of the gradients of stacks of matrices into SOAP's direction.

    Args:
        matrices: descriptions of the stacks by path.
        beta1, beta2, epsilon: β₁, β₂ and ε.
        frequency, max_dim, layout: see `soap`.
    """

    def squares(path: tuple[Any, ...], param: jax.Array) -> tuple[jax.Array | None, ...]:
        own = matrices[names(path)].axes
        stack = param.shape[: num_stack_axes(own)]
        sides = matrix_shape(param.shape, own)
        return tuple(jnp.zeros((*stack, side, side)) if side <= max_dim else None for side in sides)

    def init(params: optax.Params) -> SoapState:
        zeros = partial(jax.tree.map, lambda param: jnp.zeros(param.shape, jnp.float32))
        make = partial(jax.tree_util.tree_map_with_path, squares)
        return SoapState(jnp.zeros((), jnp.int32), zeros(params), zeros(params), make(params), make(params))

    def update_one(own: tuple[str, ...], count: jax.Array, stacks: tuple[Any, ...]) -> tuple[Any, ...]:
        grad, mu, nu, factors, bases = stacks
        shape = grad.shape
        flat = (*shape[: num_stack_axes(own)], *matrix_shape(shape, own))
        grad, mu, nu = (each.reshape(flat).astype(jnp.float32) for each in (grad, mu, nu))
        is_first = count == 0
        rotated = _rotate(grad, bases)
        mu = jnp.where(is_first, mu, beta1 * mu + (1 - beta1) * grad)
        nu = jnp.where(is_first, nu, beta2 * nu + (1 - beta2) * rotated**2)
        steps = jnp.maximum(count, 1)
        root = jnp.sqrt(nu / (1 - beta2**steps)) + epsilon
        direction = _rotate_back(_rotate(mu / (1 - beta1**steps), bases) / root, bases)
        products = _dot('...io,...jo->...ij', grad, grad), _dot('...io,...ip->...op', grad, grad)
        factors = tuple(
            None if old is None else beta2 * old + (1 - beta2) * new for old, new in zip(factors, products, strict=True)
        )
        bases = jax.lax.cond(
            is_first,
            lambda: _map(lambda factor, _: jnp.linalg.eigh(factor)[1], factors, bases),
            lambda: jax.lax.cond(
                count % frequency == 0,
                lambda: _map(lambda factor, q: jnp.linalg.qr(_dot('...ij,...jk->...ik', factor, q))[0], factors, bases),
                lambda: bases,
            ),
        )
        return *(each.reshape(shape) for each in (direction, mu, nu)), factors, bases

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SoapState]:
        assert isinstance(state, SoapState)
        del params
        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        columns = [tree.flatten_up_to(each) for each in state[1:]]
        after = []
        for (path, grad), *own in zip(leaves, *columns, strict=True):
            matrix = matrices[names(path)]
            run: Callable[..., Any] = partial(update_one, matrix.axes)
            run = run if layout is None or layout.mesh.size == 1 else _per_device(run, matrix, layout)
            after.append(run(state.step, (grad, *own)))
        directions, *new = (tree.unflatten(each) for each in zip(*after, strict=True))
        return directions, SoapState(jnp.asarray(optax.safe_increment(state.step)), *new)

    return optax.GradientTransformation(init, update)


def _per_device(function: Callable[..., Any], param: Parameter, layout: Layout) -> Callable[..., Any]:
    """Returns `function` of a number and stacks of arrays, which each device computes for its share of the stacks.

    A stack gets zeros if the number of devices does not divide its size.

    Args:
        function: its results are trees of stacks with the shapes of its arguments.
        param: parameter to whose optimizer state the stacks belong.
        layout: layout of the stacks.
    """
    num, size = num_stack_axes(param.axes), param.shape[num_stack_axes(param.axes) - 1]
    of_stack = {mesh_axis for axis in param.axes[:num] for mesh_axis in layout.mesh_axes(axis)}
    moved = [mesh_axis for mesh_axis in _SPREAD if mesh_axis not in of_stack]

    def placements(x: jax.Array) -> tuple[list[jax.NamedSharding], int]:
        shape = (*x.shape[: num - 1], size, *x.shape[num:])
        axes = param.axes if shape == param.shape else state_axes(shape, param, layout.num_shards)
        return layout.spread_matrices(axes, num, moved)

    def spread(x: jax.Array) -> jax.Array:
        steps, parts = placements(x)
        x = jnp.pad(x, [(0, -size % parts if axis == num - 1 else 0) for axis in range(x.ndim)])
        for step in steps:
            x = jax.lax.with_sharding_constraint(x, step)
        return x

    def collect(x: jax.Array) -> jax.Array:
        for step in reversed(placements(x)[0]):
            x = jax.lax.with_sharding_constraint(x, step)
        return jax.lax.slice_in_dim(x, 0, size, axis=num - 1)

    def run(count: jax.Array, stacks: Any) -> Any:
        spec = PartitionSpec(*layout.spread_matrices(param.axes, num, moved)[0][-1].spec[:num])
        mapped = jax.shard_map(
            function, mesh=layout.mesh, in_specs=(PartitionSpec(), spec), out_specs=spec, check_vma=False
        )
        return jax.tree.map(collect, mapped(count, jax.tree.map(spread, stacks)))

    return run


def _rotate(x: jax.Array, bases: Any) -> jax.Array:
    left, right = bases
    x = x if left is None else _dot('...ia,...io->...ao', left, x)
    return x if right is None else _dot('...ao,...ob->...ab', x, right)


def _rotate_back(x: jax.Array, bases: Any) -> jax.Array:
    return _rotate(x, tuple(None if base is None else jnp.swapaxes(base, -1, -2) for base in bases))


def _map(function: Callable[[jax.Array, jax.Array], jax.Array], factors: Any, bases: Any) -> tuple[Any, ...]:
    pairs = zip(factors, bases, strict=True)
    return tuple(None if factor is None else function(factor, basis) for factor, basis in pairs)
