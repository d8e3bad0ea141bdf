"""Optimizers that a user could write: a module for tests, which name its functions in `optimizer.name`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


def lion(config, learning_rate, params):
    mask = jax.tree.map(lambda param: param.kind != 'vector', params)
    return optax.lion(learning_rate, weight_decay=config.weight_decay, mask=mask)


def adafactor(config, learning_rate, params):
    return optax.adafactor(learning_rate, min_dim_size_to_factor=8)


def schedule_free(config, learning_rate, params):
    return optax.contrib.schedule_free_adamw(learning_rate, b1=0.9)


def muon(config, learning_rate, params):
    def dimensions(param):
        is_matrix = param.kind == 'matrix'
        return optax.contrib.MuonDimensionNumbers(param.input_axes, param.output_axes) if is_matrix else None

    return optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=jax.tree.map(dimensions, params))


class FactorState(NamedTuple):
    count: jax.Array
    moments: dict
    factors: list


def factors(config, learning_rate, params):
    """Scales gradients by traces of their second moments.

    The state has matrices of other shapes than the parameters. They are in dicts below the parameters, and in a list
    without their names. It also has bfloat16, scalars, a Python number and None.
    """
    kinds = [param.kind for param in jax.tree.leaves(params)]

    def init(values):
        left = [
            jnp.zeros((*value.shape[:-1], value.shape[-2])) if kind == 'matrix' else None
            for kind, value in zip(kinds, jax.tree.leaves(values), strict=True)
        ]
        moments = jax.tree.map(
            lambda value: {'sum': jnp.zeros(value.shape[:1]), 'all': jnp.zeros(value.shape, jnp.bfloat16)}, values
        )
        return FactorState(0, moments, left)

    def update(grads, state, params=None):
        directions, left, (leaves, tree) = [], [], jax.tree.flatten(grads)
        for grad, factor in zip(leaves, state.factors, strict=True):
            if factor is not None:
                factor = 0.9 * factor + jnp.einsum('...mn,...on->...mo', grad, grad)
                grad = grad / (1 + jnp.trace(factor, axis1=-2, axis2=-1)[..., None, None])
            left.append(factor)
            directions.append(grad)

        def moment(grad, old):
            total = old['sum'] + jnp.abs(grad).reshape(len(grad), -1).sum(axis=1)
            return {'sum': total, 'all': (0.9 * old['all'].astype(jnp.float32) + grad**2).astype(jnp.bfloat16)}

        rate = learning_rate(state.count)
        updates = jax.tree.map(lambda grad: -rate * grad, tree.unflatten(directions))
        return updates, FactorState(state.count + 1, jax.tree.map(moment, grads, state.moments), left)

    return optax.GradientTransformation(init, update)


def returns_nothing(config, learning_rate, params):
    optax.lion(learning_rate)


def returns_pair(config, learning_rate, params):
    return tuple(optax.lion(learning_rate))


def fails(config, learning_rate, params):
    return optax.lion(config.beta3)


def takes_too_little(config):
    return optax.lion(config.learning_rate)


def stateful(initial, update):
    """Returns an optimizer factory with the state `initial()`, which an update maps to `update(state)`."""

    def make(config, learning_rate, params):
        return optax.GradientTransformation(lambda _: initial(), lambda grads, state, params: (grads, update(state)))

    return make


string = stateful(lambda: 'adam', lambda state: state)
typed_key = stateful(lambda: jax.random.key(0), lambda state: state)
empty_array = stateful(lambda: jnp.zeros((0,)), lambda state: state)
changes_dtype = stateful(
    lambda: {'sum': jnp.zeros((), jnp.bfloat16)}, lambda state: {'sum': state['sum'] + jnp.ones(())}
)
changes_structure = stateful(lambda: (0,), lambda state: (*state, 0))


def changes_shape(config, learning_rate, params):
    return optax.stateless(lambda updates, _: jax.tree.map(lambda grad: grad[0], updates))


def plateau(config, learning_rate, params):
    return optax.chain(optax.sgd(learning_rate), optax.contrib.reduce_on_plateau())


def ignores_schedule(config, learning_rate, params):
    return optax.adamw(1e-3)


def needs_params(config, learning_rate, params):
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(learning_rate))
