"""SOAP: Adam in the eigenbases of Shampoo (Vyas et al. 2024, arXiv 2409.11321).

For a matrix with gradient G [I, O], update t = 1, 2, … computes algorithm 3 of the paper with Adam's bias correction:

    M ← β₁ M + (1 - β₁) G                                     G' = Q_Lᵀ G Q_R,  M' = Q_Lᵀ M Q_R
    V ← β₂ V + (1 - β₂) G'²                                   N = Q_L (M' / (√V + ε)) Q_Rᵀ, the direction
    L ← β₂ L + (1 - β₂) G Gᵀ,  R ← β₂ R + (1 - β₂) Gᵀ G       Q ← qr(L Q), qr(R Q) in every `frequency`-th update

Update 0 only computes L, R and their eigenvectors, and its direction is zero, as in the authors' code. The authors also
sort the eigenvectors by eigenvalue, which changes no direction but needs V to be permuted; this file does not.

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

from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.model.parameters import names
from maxlm.training.optimizers.muon import matrix_shape, num_stack_axes
from maxlm.training.optimizers.parameter_groups import DECAYED

# Updates between two computations of the eigenbases, as in the paper.
FREQUENCY = 10
# Sides of a matrix that are longer than this have the identity as basis and no preconditioner.
MAX_DIM = 4096
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
) -> optax.GradientTransformation:
    """Returns SOAP for the matrices of the blocks and Adam for all other parameters, with decoupled weight decay.

    Args:
        config: section `optimizer` of the config.
        learning_rate: learning rate by number of updates.
        params: tree of `Parameter`.
        frequency: number of updates from one computation of the eigenbases to the next.
        max_dim: longest side of a matrix with a preconditioner.
    """
    described = jax.tree.leaves_with_path(params)
    axes = {names(path): param.axes for path, param in described if param.kind == 'matrix'}
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    rotated = scale_by_soap(
        axes, beta1=config.beta1, beta2=config.beta2, epsilon=config.eps, frequency=frequency, max_dim=max_dim
    )
    kinds = jax.tree.map(lambda param: 'matrix' if param.kind == 'matrix' else 'other', params)
    decayed = jax.tree.map(lambda param: param.kind in DECAYED[config.weight_decay_mask], params)
    return optax.chain(
        optax.partition({'matrix': rotated, 'other': adam}, kinds),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_soap(
    axes: Mapping[tuple[str, ...], tuple[str, ...]],
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    frequency: int,
    max_dim: int,
) -> optax.GradientTransformation:
    """Returns the transformation of the gradients of stacks of matrices into SOAP's direction.

    Args:
        axes: logical axes of the stacks by path.
        beta1, beta2, epsilon: β₁, β₂ and ε.
        frequency, max_dim: see `soap`.
    """

    def squares(path: tuple[Any, ...], param: jax.Array) -> tuple[jax.Array | None, ...]:
        own = axes[names(path)]
        stack = param.shape[: num_stack_axes(own)]
        sides = matrix_shape(param.shape, own)
        return tuple(jnp.zeros((*stack, side, side)) if side <= max_dim else None for side in sides)

    def init(params: optax.Params) -> SoapState:
        zeros = partial(jax.tree.map, lambda param: jnp.zeros(param.shape, jnp.float32))
        make = partial(jax.tree_util.tree_map_with_path, squares)
        return SoapState(jnp.zeros((), jnp.int32), zeros(params), zeros(params), make(params), make(params))

    def update_one(
        path: tuple[Any, ...], grad: jax.Array, mu: jax.Array, nu: jax.Array, factors: Any, bases: Any, count: jax.Array
    ) -> tuple[Any, ...]:
        own, shape = axes[names(path)], grad.shape
        matrices = (*shape[: num_stack_axes(own)], *matrix_shape(shape, own))
        grad, mu, nu = (each.reshape(matrices).astype(jnp.float32) for each in (grad, mu, nu))
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
        after = [
            update_one(path, grad, mu, nu, factors, bases, state.step)
            for (path, grad), mu, nu, factors, bases in zip(leaves, *columns, strict=True)
        ]
        directions, *new = (tree.unflatten(each) for each in zip(*after, strict=True))
        return directions, SoapState(jnp.asarray(optax.safe_increment(state.step)), *new)

    return optax.GradientTransformation(init, update)


def _rotate(x: jax.Array, bases: Any) -> jax.Array:
    left, right = bases
    x = x if left is None else _dot('...ia,...io->...ao', left, x)
    return x if right is None else _dot('...ao,...ob->...ab', x, right)


def _rotate_back(x: jax.Array, bases: Any) -> jax.Array:
    return _rotate(x, tuple(None if base is None else jnp.swapaxes(base, -1, -2) for base in bases))


def _map(function: Callable[[jax.Array, jax.Array], jax.Array], factors: Any, bases: Any) -> tuple[Any, ...]:
    pairs = zip(factors, bases, strict=True)
    return tuple(None if factor is None else function(factor, basis) for factor, basis in pairs)
