"""Gradients of a global batch: gradient accumulation over micro-batches and reduction over devices.

Shapes: A accumulation steps, B batch, T length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.config.mesh import reduces_gradients_once
from maxlm.config.schema import Config
from maxlm.model.attention.ring import zigzag
from maxlm.model.layer_loop import stack_layers, unstack_layers
from maxlm.parallel.layout import TABLE, Layout
from maxlm.parallel.partitioning import Partitioning, SingleDevice
from maxlm.training.batch import Batch
from maxlm.training.fp8_history import Fp8Inputs, with_fp8_inputs
from maxlm.training.objectives import LossSums, add_sums, make_objective, zero_sums
from maxlm.training.optimizers.trainable import trainable
from maxlm.training.reference import reference_params
from maxlm.training.state import Params, TrainState, param_shardings
from maxlm.training.update import differentiable, merge_differentiable, working_fp8_inputs, working_params

# (working parameters, inputs of FP8, reference, batch, dropout key, loss factor) → sums over the batch, summed
# gradients, and the largest elements of inputs and gradients.
Accumulate = Callable[
    [Params, Fp8Inputs, Params | None, Batch, jax.Array, jax.Array | None], tuple[LossSums, Params, Params]
]
BATCH_AXES = TABLE['batch']


def make_gradients(
    config: Config, layout: Layout, num_sources: int = 0
) -> Callable[[TrainState, Batch, jax.Array, jax.Array | None], tuple[LossSums, Params, Params]]:
    """Returns a function (state, batch, dropout key, loss factor) → sums over the batch, summed gradients, and maxima.

    The gradients are float32 and have the sharding of the optimizer state. The maxima are the largest elements of the
    arrays of FP8 products with delayed scaling; without it, the tree is empty.
    """
    shardings = trainable(config, param_shardings(config, layout.of_state))
    if reduces_gradients_once(config):
        accumulate = _reduced_once(config, layout, shardings, num_sources)
    else:
        accumulate = _make_accumulate(config, layout, num_sources)

    def gradients(
        state: TrainState, batch: Batch, key: jax.Array, factor: jax.Array | None
    ) -> tuple[LossSums, Params, Params]:
        params = working_params(config, layout, state.params)
        inputs, of_kernels = working_fp8_inputs(config, layout, state)
        reference = reference_params(config, params, state.reference)
        sums, grads, maxima = accumulate(params, inputs, reference, batch, key, factor)
        maxima = jax.tree.map(jnp.maximum, maxima, of_kernels)
        return sums, jax.lax.with_sharding_constraint(grads, shardings), maxima

    return gradients


def _make_accumulate(config: Config, layout: Layout | SingleDevice, num_sources: int) -> Accumulate:
    """Returns the sums over the micro-batches of a batch, which is global, or that of one device."""
    objective = make_objective(config, layout, num_sources)
    shardings = None
    if not isinstance(layout, SingleDevice):
        shardings = trainable(config, param_shardings(config, layout.of_gradients))
    A = config.rounds
    # The first micro-batch replaces the values, so that a GPU need not write zeros. XLA would allocate an empty array
    # that is sharded as a whole on each device.
    is_empty = (
        layout.platform == 'gpu'
        and config.mesh.host_offload != 'all'
        and all(sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings))
    )
    # Products on GPUs need contiguous operands. In host memory, the layers are fetched one by one.
    is_unstacked = (
        layout.platform == 'gpu'
        and not config.model.scan_layers
        and layout.num_shards('layers') == 1
        and config.mesh.host_offload != 'all'
    )

    def place(grads: Params) -> Params:
        return grads if shardings is None else jax.lax.with_sharding_constraint(grads, shardings)

    def loss_fn(
        diff_params: Params,
        scales: Params,
        params: Params,
        kernels: Params,
        reference: Params | None,
        batch: Batch,
        dropout_key: jax.Array,
        factor: jax.Array | None,
    ) -> tuple[jax.Array, LossSums]:
        params, slots = merge_differentiable(config, params, diff_params)
        params = with_fp8_inputs(params, Fp8Inputs(kernels, scales))
        loss, sums = objective(params, reference, slots, batch, dropout_key)
        return (loss if factor is None else factor * loss), sums

    def accumulate(
        params: Params,
        inputs: Fp8Inputs,
        reference: Params | None,
        batch: Batch,
        key: jax.Array,
        factor: jax.Array | None,
    ) -> tuple[LossSums, Params, Params]:
        kernels, scales = inputs
        create = jax.lax.empty if is_empty else jnp.zeros
        zero_grads = place(jax.tree.map(lambda p: create(p.shape, jnp.float32), trainable(config, params)))
        if is_unstacked:
            # Otherwise each micro-batch would copy the parameters of each layer out of the stacked arrays.
            params, kernels = unstack_layers(params), unstack_layers(kernels)
        diff_params = differentiable(config, params, zero_grads)

        def add(
            totals: tuple[LossSums, Params, Params], inputs: tuple[jax.Array, Batch]
        ) -> tuple[tuple[LossSums, Params, Params], None]:
            index, micro_batch = inputs
            grad_fn = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
            (_, sums), (grads, maxima) = grad_fn(
                diff_params, scales, params, kernels, reference, micro_batch, jax.random.fold_in(key, index), factor
            )
            *sum_totals, largest = totals
            with jax.named_scope('gradient_sum'):
                grads = place(stack_layers(grads) if is_unstacked else grads)
                before = sum_totals[1]
                if is_empty:
                    before = jax.tree.map(lambda total: jnp.where(index == 0, 0, total), before)
                added = add_sums(sum_totals[0], sums), jax.tree.map(jnp.add, before, grads)
                return (*added, jax.tree.map(jnp.maximum, largest, maxima)), None

        zeros = (zero_sums(config, num_sources), zero_grads, jax.tree.map(jnp.zeros_like, scales))
        totals, _ = jax.lax.scan(add, zeros, (jnp.arange(A), split_micro_batches(batch, A, layout)))
        return totals

    return accumulate


def _reduced_once(config: Config, layout: Layout, shardings: Params, num_sources: int) -> Accumulate:
    """Returns the sums over a global batch: each device accumulates its own rows, then the sums are reduced once."""
    accumulate = _make_accumulate(config, SingleDevice(layout.platform), num_sources)

    def on_device(*inputs: Any) -> tuple[LossSums, Params, Params]:
        sums, grads, maxima = accumulate(*inputs)
        grads = jax.tree.map(_reduce_scatter, grads, shardings)
        largest = jax.lax.pmax(sums.largest, BATCH_AXES)
        return jax.lax.psum(sums, BATCH_AXES)._replace(largest=largest), grads, jax.lax.pmax(maxima, BATCH_AXES)

    whole, specs = PartitionSpec(), jax.tree.map(lambda sharding: sharding.spec, shardings)
    # Replication is not checked, because the kernels of attention do not declare it.
    return jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=(whole, whole, whole, PartitionSpec(BATCH_AXES), whole, whole),
        out_specs=(whole, specs, whole),
        check_vma=False,
    )


def _reduce_scatter(grad: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns the shard of the sum of `grad` over all devices, within `jax.shard_map`."""
    scattered: set[str] = set()
    for dim, names in enumerate(sharding.spec):
        axes = tuple(axis for axis in ((names,) if isinstance(names, str) else names or ()) if axis in BATCH_AXES)
        if axes:
            grad = jax.lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
            scattered.update(axes)
    reduced: jax.Array = jax.lax.psum(grad, tuple(axis for axis in BATCH_AXES if axis not in scattered))
    return reduced


def split_micro_batches(batch: Batch, num: int, partitioning: Partitioning) -> Batch:
    """Splits arrays [B, T, …] into [A, B/A, T, …], and [B] into [A, B/A].

    Row r goes to micro-batch r mod A, so no row moves to another device. If the sequence length is sharded, positions
    are reordered by `zigzag`.
    """

    def split(rows: jax.Array) -> jax.Array:
        axes = ('micro_batch', 'batch', 'length')[: rows.ndim + 1]
        num_shards = partitioning.num_shards('length')
        if rows.ndim > 1 and num_shards > 1:
            rows = rows[:, zigzag(rows.shape[1], num_shards)]
        return partitioning.constrain(rows.reshape(-1, num, *rows.shape[1:]).swapaxes(0, 1), axes)

    return {name: split(rows) for name, rows in batch.items()}
