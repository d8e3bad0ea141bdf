"""The training step with gradient accumulation: the complete update as one pure function of (state, batch).

Shapes: A accumulation steps, B batch, T length, S sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.model.attention.ring import zigzag
from maxlm.parallel.layout import Layout
from maxlm.training.loss_scale import loss_factor, update_loss_scale
from maxlm.training.objectives import Batch, LossSums, make_objective, zero_sums
from maxlm.training.optimizers.offload import global_norm
from maxlm.training.optimizers.trainable import trainable
from maxlm.training.reference import reference_params
from maxlm.training.spike_guard import check_spike
from maxlm.training.state import Metrics, Params, TrainState, param_shardings
from maxlm.training.update import differentiable, make_update, mean_and_clip, merge_differentiable, working_params


def make_train_step(
    config: Config, layout: Layout, num_sources: int = 0
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the training step of a resolved config: one optimizer update from one global batch.

    If `num_sources` > 0, batches contain `sources` [B], and the metrics contain `source_loss` and `source_tokens` [S].
    """
    objective = make_objective(config, layout, num_sources)
    update = make_update(config, layout)
    gradient_shardings = trainable(config, param_shardings(config, layout.of_gradients))
    state_shardings = trainable(config, param_shardings(config, layout.of_state))
    A = config.rounds

    def loss_fn(
        diff_params: Params, state: TrainState, batch: Batch, dropout_key: jax.Array | None, factor: jax.Array | None
    ) -> tuple[jax.Array, LossSums]:
        params, slots = merge_differentiable(config, state.params, diff_params)
        reference = reference_params(config, state.params, state.reference)
        loss, sums = objective(params, reference, slots, batch, dropout_key)
        return (loss if factor is None else factor * loss), sums

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        # The loss scale applies to a mean, because the gradients of a sum would overflow float16.
        factor = loss_factor(state.loss_scale, A / batch['tokens'].size)
        zero_grads = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), trainable(config, state.params))
        zero_grads = jax.lax.with_sharding_constraint(zero_grads, gradient_shardings)
        working = state._replace(params=working_params(config, layout, state.params))
        diff_params = differentiable(config, working.params, zero_grads)

        def accumulate(totals: Any, inputs: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, micro_batch = inputs
            grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
            (_, sums), grads = grad_fn(diff_params, working, micro_batch, jax.random.fold_in(key, index), factor)
            grads = jax.lax.with_sharding_constraint(grads, gradient_shardings)
            with jax.named_scope('gradient_sum'):
                return jax.tree.map(jnp.add, totals, (sums, grads)), None

        zeros = (zero_sums(config, num_sources), zero_grads)
        micro_batches = split_micro_batches(batch, A, layout)
        (sums, grads), _ = jax.lax.scan(accumulate, zeros, (jnp.arange(A), micro_batches))

        # Micro-batches contribute sums, so each token has the same weight in the mean.
        count = jnp.maximum(sums.weight, 1)
        loss = sums.loss / count
        grads = jax.lax.with_sharding_constraint(grads, state_shardings)
        grads, grad_norm = mean_and_clip(grads, count, factor, config.optimizer.max_grad_norm)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        ok, window = check_spike(state.window, loss, grad_norm, config.guard)
        params, opt_state, ema, learning_rate = update(state, grads, ok)
        loss_scale, scaling = update_loss_scale(state.loss_scale, loss, is_finite=is_finite, ok=ok, config=config.train)
        metrics = {
            'loss': loss,
            'tokens': sums.tokens,
            'grad_norm': grad_norm,
            'param_norm': jax.named_scope('optimizer')(global_norm)(params),
            'learning_rate': learning_rate,
            'skipped': ~ok,
            'spike': is_finite & ~ok,
            **scaling,
            **{name: total / jnp.maximum(sums.parts_count, 1) for name, total in sums.parts.items()},
            **({'source_loss': sums.source_loss, 'source_tokens': sums.source_tokens} if num_sources else {}),
        }
        state = state._replace(step=state.step + 1, skipped=state.skipped + ~ok, params=params, opt_state=opt_state)
        return state._replace(ema=ema, loss_scale=loss_scale, window=window), metrics

    return train_step


def make_eval_step(
    config: Config, layout: Layout, num_sources: int = 0
) -> Callable[[Params, Params | None, Batch], LossSums]:
    """Returns the evaluation step: (params, reference, batch) → sums over the batch, without dropout and z-loss.

    The argument `reference` is `TrainState.reference`.
    """
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, z_loss=0.0))
    objective = make_objective(config, layout, num_sources)

    def eval_step(params: Params, reference: Params | None, batch: Batch) -> LossSums:
        reference = reference_params(config, params, reference)

        def accumulate(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, objective(params, reference, None, micro_batch, None)[1]), None

        micro_batches = split_micro_batches(batch, config.rounds, layout)
        sums, _ = jax.lax.scan(accumulate, zero_sums(config, num_sources), micro_batches)
        return sums

    return eval_step


def split_micro_batches(batch: Batch, num: int, layout: Layout) -> Batch:
    """Splits arrays [B, T] into [A, B/A, T], and [B] into [A, B/A].

    Row r goes to micro-batch r mod A, so no row moves to another device. If the sequence length is sharded, positions
    are reordered by `zigzag`.
    """

    def split(rows: jax.Array) -> jax.Array:
        axes = ('micro_batch', 'batch', 'length')[: rows.ndim + 1]
        num_shards = layout.num_shards('length')
        if rows.ndim == 2 and num_shards > 1:
            rows = rows[:, zigzag(rows.shape[1], num_shards)]
        return layout.constrain(rows.reshape(-1, num, *rows.shape[1:]).swapaxes(0, 1), axes)

    return {name: split(rows) for name, rows in batch.items()}
