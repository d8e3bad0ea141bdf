"""Rows of experts: sorting, capacity and exchange between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from maxlm.model.experts.dispatch import (
    from_rows,
    limit_by_capacity,
    make_exchange,
    send,
    send_back,
    sort_by_expert,
    to_rows,
)

N, K, D, E = 12, 2, 3, 6


def choices(seed=0, tokens=N):
    """Returns different experts for each token, [tokens, K]."""
    rng = np.random.default_rng(seed)
    return jnp.array([rng.choice(E, K, replace=False) for _ in range(tokens)])


def expert_of_row(sizes, num_rows):
    return np.searchsorted(np.cumsum(sizes), np.arange(num_rows), side='right')


@pytest.mark.parametrize('block', [1, 4])
def test_every_assignment_gets_a_row_of_its_expert(block):
    # Token 3 is padding.
    experts = choices().at[3].set(E)
    dispatch = sort_by_expert(experts, E, block)
    num_rows = len(dispatch.assignment_R)
    assert not (dispatch.sizes_E % block).any()
    owner = np.append(expert_of_row(dispatch.sizes_E, num_rows), E)
    np.testing.assert_array_equal(owner[dispatch.row_Nk], experts)
    used = dispatch.row_Nk[dispatch.row_Nk < num_rows]
    assert len(used) == len(set(used.tolist())) == (N - 1) * K
    np.testing.assert_array_equal(dispatch.row_Nk.reshape(-1)[dispatch.assignment_R[used]], used)


def test_rows_and_back():
    x_ND = jnp.arange(N * D, dtype=jnp.float32).reshape(N, D)
    dispatch = sort_by_expert(choices().at[3].set(E), E, 4)
    there_and_back = from_rows(to_rows(x_ND, dispatch), dispatch)
    expected = np.repeat(np.asarray(x_ND)[:, None], K, axis=1)
    expected[3] = 0
    np.testing.assert_array_equal(there_and_back, expected)
    # The functions are linear, and each is the transpose of the other, as their gradients assume.
    rng = np.random.default_rng(1)
    y_RD, z_NkD = rng.normal(size=(len(dispatch.assignment_R), D)), rng.normal(size=(N, K, D))
    for function, point, weights in ((to_rows, x_ND, y_RD), (from_rows, jnp.asarray(y_RD), z_NkD)):
        gradient = jax.grad(lambda x, f=function, w=weights: (f(x, dispatch) * w).sum())(point)
        step = jnp.asarray(rng.normal(size=point.shape), jnp.float32)
        moved = (function(step, dispatch) * weights).sum()
        np.testing.assert_allclose((gradient * step).sum(), moved, rtol=1e-4)


def test_capacity_is_per_sequence_and_prefers_first_choices():
    # Two sequences of three tokens. All tokens of the first prefer expert 0 and have expert 1 as second choice.
    experts = jnp.array([[0, 1], [0, 1], [0, 1], [1, 0], [2, 3], [2, 1]])
    dispatch = limit_by_capacity(experts, E, num_sequences=2, capacity=2)
    has_row = dispatch.row_Nk < len(dispatch.assignment_R)
    np.testing.assert_array_equal(has_row, [[1, 1], [1, 1], [0, 0], [1, 1], [1, 1], [1, 1]])
    owner = np.append(expert_of_row(dispatch.sizes_E, len(dispatch.assignment_R)), E)
    np.testing.assert_array_equal(np.where(has_row, owner[dispatch.row_Nk], experts), experts)
    # Expert 1 gets the first choice of token 3 before the second choice of token 5.
    limited = limit_by_capacity(experts, E, num_sequences=2, capacity=1)
    assert (limited.row_Nk < len(limited.assignment_R)).tolist()[3:] == [[True, True], [True, True], [False, False]]


@pytest.mark.parametrize('block', [1, 2])
def test_devices_exchange_the_rows_of_their_experts(block):
    P = 2
    mesh = Mesh(np.array(jax.devices()[:P]), ('expert',))
    # All tokens of the first device select experts of the second, the largest exchange that can occur.
    experts = choices(tokens=2 * N).at[:N].set(jnp.array([4, 5])).at[N].set(E)
    x_ND = jnp.arange(2 * N * D, dtype=jnp.float32).reshape(-1, D) + 1

    def on_device(x_ND, expert_Nk):
        exchange = make_exchange(expert_Nk, E, block, axis='expert', num_devices=P, is_ragged=False)
        rows = send(x_ND, exchange)
        local = jnp.searchsorted(jnp.cumsum(exchange.received.sizes_E), jnp.arange(len(rows)), side='right')
        # Each expert multiplies by its number.
        factor = jax.lax.axis_index('expert') * (E // P) + local + 1
        return send_back(rows * factor[:, None], exchange)

    spec = PartitionSpec('expert')
    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
    factors = np.where(experts < E, experts + 1, 0)
    np.testing.assert_array_equal(run(x_ND, experts), factors[:, :, None] * np.asarray(x_ND)[:, None])
    gradient = jax.grad(lambda x: run(x, experts).sum())(x_ND)
    np.testing.assert_array_equal(gradient, np.repeat(factors.sum(axis=1)[:, None], D, axis=1))
