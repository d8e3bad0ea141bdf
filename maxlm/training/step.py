"""The training step with gradient accumulation: the whole update in one pure function of (state, batch).

Shapes: A micro-batches, B batch, T length, S sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.config.schema import Config
from maxlm.model.attention.ring import zigzag
from maxlm.parallel.layout import Layout
from maxlm.training.loss_scale import next_loss_scale
from maxlm.training.objectives import Batch, LossSums, make_objective, zero_sums
from maxlm.training.optimizers.offload import layer_by_layer, norm
from maxlm.training.optimizers.schedule import make_schedule, rate_at
from maxlm.training.optimizers.trainable import merge_trainable, trainable
from maxlm.training.reference import without_adapters
from maxlm.training.spike_guard import check_spike
from maxlm.training.state import Metrics, Params, TrainState, optimizer_of, param_shardings


def make_train_step(
    config: Config, layout: Layout, num_sources: int = 0
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a resolved config: one optimizer update from one global batch.

    With `num_sources` batches have `sources`, and metrics tell losses by source.
    """
    objective = make_objective(config, layout, num_sources)
    A, max_grad_norm = config.rounds, config.optimizer.max_grad_norm
    gradient_shardings = trainable(config, param_shardings(config, layout.of_gradients))
    moment_shardings = trainable(config, param_shardings(config, layout.of_moments))

    def loss_fn(
        diff_params: Params, state: TrainState, batch: Batch, dropout_key: jax.Array, factor: jax.Array | None
    ) -> tuple[jax.Array, LossSums]:
        # Gradients of parameters in host memory are those of what stands in for them on the device.
        slots = diff_params if config.mesh.host_offload == 'all' else None
        params = merge_trainable(state.params, diff_params) if slots is None else state.params
        reference = state.reference
        if reference is None and config.has_reference:
            reference = without_adapters(state.params)
        loss, sums = objective(params, reference, slots, batch, dropout_key)
        return (loss if factor is None else factor * loss), sums

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        trained = trainable(config, state.params)
        factor = None
        if state.loss_scale is not None:
            # Of a mean and not of a sum, whose gradients would leave float16 at the other end.
            factor = state.loss_scale.scale * (A / batch['tokens'].size)

        def add_micro_batch(totals: Any, inputs: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, micro_batch = inputs
            dropout_key = jax.random.fold_in(key, index)
            differentiate = jax.value_and_grad(loss_fn, has_aux=True)
            diff_params = no_grads if config.mesh.host_offload == 'all' else trained
            (_, sums), grads = differentiate(diff_params, state, micro_batch, dropout_key, factor)
            grads = jax.lax.with_sharding_constraint(grads, gradient_shardings)
            return jax.tree.map(jnp.add, totals, (sums, grads)), None

        no_grads = jax.tree.map(lambda param: jnp.zeros(param.shape, param.dtype), trained)
        no_grads = jax.lax.with_sharding_constraint(no_grads, gradient_shardings)
        zeros = (zero_sums(config, num_sources), no_grads)
        micro_batches = {name: split_micro_batches(rows, A, layout) for name, rows in batch.items()}
        (sums, grads), _ = jax.lax.scan(add_micro_batch, zeros, (jnp.arange(A), micro_batches))

        # Sums until here, so that every token counts the same, wherever the micro-batches were cut.
        count = jnp.maximum(sums.weight, 1)
        loss = sums.loss / count
        grads = jax.lax.with_sharding_constraint(grads, moment_shardings)
        # One multiplication makes them means, takes out the loss scale, and clips.
        scale = 1 / count if factor is None else 1 / (count * factor)
        grad_norm = scale * optax.tree.norm(grads)
        if max_grad_norm:
            scale *= jnp.minimum(1, max_grad_norm / jnp.maximum(grad_norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
        num_updates = state.step - state.skipped
        schedule = make_schedule(config.optimizer, config.train.num_steps)
        if state.progress is not None:
            # Its length changes during the run and must not be a constant of the program.
            schedule = optax.constant_schedule(rate_at(config.optimizer, state.progress, state.step))
        optimizer = optimizer_of(config, layout, schedule)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        ok, window = check_spike(state.window, loss, grad_norm, config.guard)

        def update(grads: Params, params: Params, opt_state: Any, ema: Params | None) -> tuple[Any, ...]:
            old = params, opt_state, ema
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            ema = _average(ema, params, decay=config.optimizer.ema_decay, num_updates=num_updates + 1)
            # A selection, not a product with 0: NaN times 0 is NaN.
            return jax.tree.map(lambda new, old: jnp.where(ok, new, old), (params, opt_state, ema), old)

        if config.mesh.host_offload != 'none':
            update = layer_by_layer(update)
        moving = None if state.ema is None else trainable(config, state.ema)
        trained, opt_state, moving = update(grads, trained, state.opt_state, moving)
        params = merge_trainable(state.params, trained)
        ema = None if state.ema is None else merge_trainable(state.ema, moving)
        loss_scale, scaling = state.loss_scale, {}
        if loss_scale is not None:
            # A loss that is not finite itself, or a gradient that is not without a scale, is no matter of the scale.
            overflow = ~finite & jnp.isfinite(loss) & (loss_scale.scale > 1)
            scaling = {'loss_scale': loss_scale.scale, 'overflow': overflow}
            after = next_loss_scale(loss_scale, overflow, config.train)
            loss_scale = jax.tree.map(lambda new, old: jnp.where(ok | overflow, new, old), after, loss_scale)
        metrics = {
            'loss': loss,
            'tokens': sums.tokens,
            'grad_norm': grad_norm,
            'param_norm': norm(params) if config.mesh.host_offload == 'all' else optax.tree.norm(params),
            'learning_rate': schedule(num_updates),
            'skipped': ~ok,
            'spike': finite & ~ok,
            **scaling,
            **{name: total / jnp.maximum(sums.parts_count, 1) for name, total in sums.parts.items()},
            **({'source_loss': sums.source_loss, 'source_tokens': sums.source_tokens} if num_sources else {}),
        }
        counters = state.step + 1, state.skipped + ~ok
        kept = state.reference, state.progress
        return TrainState(*counters, params, opt_state, ema, loss_scale, window, *kept), metrics

    return train_step


def make_eval_step(
    config: Config, layout: Layout, num_sources: int = 0
) -> Callable[[Params, Params | None, Batch], LossSums]:
    """(params, reference, batch) → sums over the batch, without dropout and z-loss; `reference` as in the state."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, z_loss=0.0))
    objective = make_objective(config, layout, num_sources)
    A = config.rounds

    def eval_step(params: Params, reference: Params | None, batch: Batch) -> LossSums:
        micro_batches = {name: split_micro_batches(rows, A, layout) for name, rows in batch.items()}
        if reference is None and config.has_reference:
            reference = without_adapters(params)

        def add_micro_batch(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, objective(params, reference, None, micro_batch, None)[1]), None

        sums, _ = jax.lax.scan(add_micro_batch, zero_sums(config, num_sources), micro_batches)
        return sums

    return eval_step


def split_micro_batches(rows: jax.Array, num: int, layout: Layout) -> jax.Array:
    """[B, T] → [A, B/A, T], or [B] → [A, B/A]. Row r goes to micro-batch r mod A, so that no row changes its device.

    Where the length is split over devices, its order is then that of `zigzag`.
    """
    axes = ('micro_batch', 'batch', 'length')[: rows.ndim + 1]
    if rows.ndim == 2 and layout.num_shards('length') > 1:
        rows = rows[:, zigzag(rows.shape[1], layout.num_shards('length'))]
    return layout.constrain(rows.reshape(-1, num, *rows.shape[1:]).swapaxes(0, 1), axes)


def _average(ema: Params | None, params: Params, *, decay: float, num_updates: jax.Array) -> Params | None:
    """The moving average after the update that is number `num_updates`, from 1.

    Its memory is a part of the run so far at first, or it would hold on to the initial parameters for 1 / (1 - decay)
    updates; as TensorFlow's ExponentialMovingAverage does with `num_updates`.
    """
    if ema is None:
        return None
    decay_now = jnp.minimum(decay, (1 + num_updates) / (10 + num_updates))
    return jax.tree.map(lambda average, param: decay_now * average + (1 - decay_now) * param, ema, params)
