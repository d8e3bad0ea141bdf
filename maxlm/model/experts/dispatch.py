"""Order of the rows that experts process, and exchange of rows between devices (expert parallelism).

A token with k experts has k assignments. The rows of an expert are the tokens of its assignments, and the rows of all
experts are consecutive. A `Dispatch` maps between assignments and rows.

Shapes, per device: N tokens, k experts per token, A = N·k assignments, R rows, D dim, E experts, P devices that
exchange rows, C rows from one device to another.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.experts.grouped_matmul import padded_rows


class Dispatch(NamedTuple):
    """Rows of the experts.

    Attributes:
        row_Nk: row of each assignment; R if the assignment has none.
        assignment_R: index of the assignment of each row in row_Nk.reshape(-1); A if the row is unused.
        sizes_E: number of rows of each expert, including padding.
    """

    row_Nk: jax.Array
    assignment_R: jax.Array
    sizes_E: jax.Array


def sort_by_expert(expert_Nk: jax.Array, num_experts: int, block: int) -> Dispatch:
    """Returns rows sorted by expert.

    Args:
        expert_Nk: expert of each assignment; E for assignments without a row.
        num_experts: number of experts E.
        block: the number of rows of each expert is padded to a multiple of this.
    """
    A, E = expert_Nk.size, num_experts
    expert_A = expert_Nk.reshape(-1)
    order_A = jnp.argsort(expert_A, stable=True)
    sizes_E = jnp.bincount(expert_A, length=E)
    padded_E = -(-sizes_E // block) * block
    # Number of padding rows before each expert; assignments without a row are last.
    shift_E = jnp.append(jnp.cumsum(padded_E - sizes_E) - (padded_E - sizes_E), 0)
    sorted_A = expert_A[order_A]
    num_rows = padded_rows(A, E, block)
    row_A = jnp.where(sorted_A < E, jnp.arange(A) + shift_E[sorted_A], num_rows)
    return _dispatch(order_A, row_A, num_rows, padded_E, expert_Nk.shape)


def limit_by_capacity(expert_Nk: jax.Array, num_experts: int, num_sequences: int, capacity: int) -> Dispatch:
    """Returns `capacity` rows for each expert and sequence (Lepikhin et al. 2020, "GShard").

    An expert processes the first tokens of a sequence that select it. First choices of all tokens precede second
    choices. Further assignments have no row.

    Args:
        expert_Nk: expert of each assignment, in descending order of the scores; E for assignments without a row.
        num_experts: number of experts E.
        num_sequences: number of sequences of equal length into which the tokens are divided.
        capacity: number of rows of an expert and a sequence.
    """
    (N, k), E = expert_Nk.shape, num_experts
    # [sequences, k, tokens]: the order in which assignments get their rows.
    expert_BkT = expert_Nk.reshape(num_sequences, -1, k).swapaxes(1, 2)
    expert_BA = expert_BkT.reshape(num_sequences, -1)
    is_expert_BAE = jax.nn.one_hot(expert_BA, E, dtype=jnp.int32)
    rank_BA = ((jnp.cumsum(is_expert_BAE, axis=1) - 1) * is_expert_BAE).sum(axis=-1)
    row_BA = (expert_BA * num_sequences + jnp.arange(num_sequences)[:, None]) * capacity + rank_BA
    num_rows = E * num_sequences * capacity
    row_BA = jnp.where((rank_BA < capacity) & (expert_BA < E), row_BA, num_rows)
    row_Nk = row_BA.reshape(num_sequences, k, -1).swapaxes(1, 2).reshape(N, k)
    sizes_E = jnp.full(E, num_sequences * capacity)
    return _dispatch(jnp.arange(N * k), row_Nk.reshape(-1), num_rows, sizes_E, (N, k))


def _dispatch(
    assignment_A: jax.Array, row_A: jax.Array, num_rows: int, sizes_E: jax.Array, shape: tuple[int, ...]
) -> Dispatch:
    """Returns the dispatch in which assignment_A[i] has row row_A[i]; `num_rows` means no row."""
    A = row_A.size
    row_Nk = jnp.zeros(A, row_A.dtype).at[assignment_A].set(row_A, unique_indices=True).reshape(shape)
    assignment_R = jnp.full(num_rows, A, assignment_A.dtype).at[row_A].set(assignment_A, mode='drop')
    return Dispatch(row_Nk, assignment_R, sizes_E)


@jax.custom_vjp
def to_rows(x_ND: jax.Array, dispatch: Dispatch) -> jax.Array:
    """Returns the token of each row, [R, D]; 0 for unused rows.

    The gradient is a sum over the k rows of each token. JAX's own derivative would be a scatter, in which several rows
    add to one token, so that the order of additions and their rounding could vary.
    """
    return _taken(x_ND, dispatch.assignment_R // dispatch.row_Nk.shape[1])


@jax.custom_vjp
def from_rows(y_RD: jax.Array, dispatch: Dispatch) -> jax.Array:
    """Returns the row of each assignment, [N, k, D]; 0 for assignments without a row."""
    return _taken(y_RD, dispatch.row_Nk)


def _taken(x_ND: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x_ND, index, axis=0, mode='fill', fill_value=0)


def _to_rows_forward(x_ND: jax.Array, dispatch: Dispatch) -> tuple[jax.Array, Dispatch]:
    return to_rows(x_ND, dispatch), dispatch


def _to_rows_backward(dispatch: Dispatch, grad_RD: jax.Array) -> tuple[jax.Array, None]:
    return from_rows(grad_RD, dispatch).sum(axis=1), None


def _from_rows_forward(y_RD: jax.Array, dispatch: Dispatch) -> tuple[jax.Array, Dispatch]:
    return from_rows(y_RD, dispatch), dispatch


def _from_rows_backward(dispatch: Dispatch, grad_NkD: jax.Array) -> tuple[jax.Array, None]:
    return _taken(grad_NkD.reshape(-1, grad_NkD.shape[-1]), dispatch.assignment_R), None


to_rows.defvjp(_to_rows_forward, _to_rows_backward)
from_rows.defvjp(_from_rows_forward, _from_rows_backward)


class Exchange(NamedTuple):
    """Rows that devices send to each other, so that each device processes the rows of its own experts.

    The buffer of a device holds C rows from every device. C is the largest number that can occur, so no row is dropped.

    Attributes:
        sent: rows that this device sends, C for each device.
        received: the received rows, sorted by expert.
        num_sent_P: number of rows that this device sends to each device.
        axis: mesh axis of the devices.
        is_ragged: only the rows that exist are sent, instead of C.
    """

    sent: Dispatch
    received: Dispatch
    num_sent_P: jax.Array
    axis: str
    is_ragged: bool


def make_exchange(
    expert_Nk: jax.Array, num_experts: int, block: int, *, axis: str, num_devices: int, is_ragged: bool
) -> Exchange:
    """Returns the exchange of all assignments. It must be called within `jax.shard_map`.

    Args:
        expert_Nk: expert of each assignment; E for assignments without a row.
        num_experts: number of experts E of all devices; device p has the experts from p · E / P.
        block: the number of rows of each expert is padded to a multiple of this.
        axis: mesh axis over which the experts are sharded.
        num_devices: its number of devices P.
        is_ragged: use `jax.lax.ragged_all_to_all`, which XLA supports on GPUs and TPUs.
    """
    (N, k), local = expert_Nk.shape, num_experts // num_devices
    # A token selects different experts, so it has at most `local` assignments for one device.
    C, A = N * min(k, local), N * k
    # Sorting by expert also sorts by device.
    order_A = jnp.argsort(expert_Nk.reshape(-1), stable=True)
    sorted_A = expert_Nk.reshape(-1)[order_A]
    device_A = sorted_A // local
    num_sent_P = jnp.bincount(device_A, length=num_devices)
    first_P = jnp.append(jnp.cumsum(num_sent_P) - num_sent_P, A)
    row_A = jnp.where(sorted_A < num_experts, device_A * C + jnp.arange(A) - first_P[device_A], num_devices * C)
    sent = _dispatch(order_A, row_A, num_devices * C, num_sent_P, (N, k))
    expert_of_row = jnp.append(expert_Nk.reshape(-1) % local, local)[sent.assignment_R]
    expert_of_received = jax.lax.all_to_all(expert_of_row, axis, 0, 0, tiled=True)
    received = sort_by_expert(expert_of_received[:, None], local, block)
    return Exchange(sent, received, num_sent_P, axis, is_ragged)


def send(x_ND: jax.Array, exchange: Exchange) -> jax.Array:
    """Returns the rows of this device's experts, [R, D], from the tokens of all devices."""
    rows = _all_to_all(to_rows(x_ND, exchange.sent), exchange, exchange.num_sent_P)
    return to_rows(rows, exchange.received)


def send_back(y_RD: jax.Array, exchange: Exchange) -> jax.Array:
    """Returns the row of each assignment of this device, [N, k, D], from the rows of all devices."""
    num_received_P = jax.lax.all_to_all(exchange.num_sent_P, exchange.axis, 0, 0, tiled=True)
    rows = _all_to_all(from_rows(y_RD, exchange.received)[:, 0], exchange, num_received_P)
    return from_rows(rows, exchange.sent)


def _all_to_all(x_RD: jax.Array, exchange: Exchange, num_sent_P: jax.Array) -> jax.Array:
    """Sends C rows to each device, of which the first `num_sent_P` are used."""
    axis = exchange.axis
    if not exchange.is_ragged:
        return jax.lax.all_to_all(x_RD, axis, 0, 0, tiled=True)
    C = len(x_RD) // len(num_sent_P)
    num_received_P = jax.lax.all_to_all(num_sent_P, axis, 0, 0, tiled=True)
    offsets_P = jnp.arange(len(num_sent_P), dtype=num_sent_P.dtype) * C
    own_offset_P = jnp.full_like(offsets_P, C) * jax.lax.axis_index(axis)
    return jax.lax.ragged_all_to_all(
        x_RD, jnp.zeros_like(x_RD), offsets_P, num_sent_P, own_offset_P, num_received_P, axis_name=axis
    )
