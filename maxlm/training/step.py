"""The training step: the complete update as one pure function of (state, batch).

Shapes: B batch, S sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.config.schema import Config
from maxlm.config.sections.distill import DistillConfig
from maxlm.parallel.layout import Layout
from maxlm.training.batch import HOLD, Batch
from maxlm.training.fp8_history import record_maxima
from maxlm.training.gradients import make_gradients, split_micro_batches
from maxlm.training.loss_scale import loss_factor, update_loss_scale
from maxlm.training.objectives import LossSums, add_sums, make_objective, zero_sums
from maxlm.training.optimizers.offload import global_norm
from maxlm.training.optimizers.trainable import measured_params
from maxlm.training.reference import reference_params
from maxlm.training.reference_point import make_reference_point
from maxlm.training.spike_guard import check_spike
from maxlm.training.state import Metrics, Params, TrainState
from maxlm.training.update import balance_loads, make_update, mean_and_clip


def make_train_step(
    config: Config,
    layout: Layout,
    num_sources: int = 0,
    *,
    optimizer: optax.GradientTransformation | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the training step of a resolved config: one optimizer update from one global batch.

    Batches may contain HOLD. A step with a spike or a non-finite value, for which the metric `bad` is True, changes
    only three counters of the state: `step`, `skipped` and the number of steps in `spike_window`, which the metric
    `window_steps` contains as it was before the step. `maxlm.trainer.replay` depends on it.

    Args:
        config: resolved config.
        layout: layout of the devices.
        num_sources: number of data sources. Above 0, batches contain `sources` [B], and the metrics contain
            `source_loss` and `source_tokens` [S].
        optimizer: optimizer in place of that of the config; `init_state` needs the same. It receives the clipped
            gradients of the trainable parameters. The metrics then contain no `learning_rate`.

    Examples:
        >>> from maxlm.config.loading import load
        >>> from maxlm.config.resolve import resolve
        >>> from maxlm.parallel.layout import make_layout
        >>> from maxlm.training.batch import BATCH_TYPES
        >>> from maxlm.training.state import abstract_state
        >>> config = resolve(load('tiny'), platform='cpu', num_devices=1, vocab_size=512, windows=None)
        >>> layout = make_layout(config.mesh, jax.devices()[:1])
        >>> shape = config.train.global_batch_size, config.data.seq_len
        >>> batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in BATCH_TYPES.items()}
        >>> state, metrics = jax.eval_shape(make_train_step(config, layout), abstract_state(config, layout), batch)
        >>> metrics['loss']
        ShapeDtypeStruct(shape=(), dtype=float32)
    """
    with_reference_point = make_reference_point(config, layout)
    gradients = make_gradients(config, layout, num_sources)
    update = make_update(config, layout, optimizer)

    def param_norm(params: Params) -> jax.Array:
        measured = measured_params(config, params)
        # Without the barrier, the sum takes the place of those of `update_metrics` in the kernels of the update.
        return global_norm(measured if config.mesh.host_offload == 'all' else jax.lax.optimization_barrier(measured))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = dict(batch)
        hold = batch.pop(HOLD, None)
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        # The loss scale applies to a mean, because the gradients of a sum would overflow float16.
        factor = loss_factor(state.loss_scale, config.rounds / batch['tokens'].size)
        batch = with_reference_point(state.params, state.reference, batch)
        sums, grads, maxima = gradients(state, batch, key, factor)

        # Micro-batches contribute sums, so each token has the same weight in the mean.
        count = jnp.maximum(sums.weight, 1)
        loss = sums.loss / count
        grads, grad_norm = mean_and_clip(grads, count, factor, config.optimizer.max_grad_norm)
        if maxima:
            # Delayed scaling turns infinity into the largest value of FP8, so loss and gradients may be finite.
            are_finite = jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x: jnp.isfinite(x).all(), maxima))
            loss = jnp.where(are_finite, loss, jnp.nan)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        ok, spike_window = check_spike(state.spike_window, loss, grad_norm, config.guard)
        if hold is not None:
            ok &= ~hold
        params, opt_state, ema, update_metrics = update(state, grads, ok)
        params = balance_loads(config, params, sums.load_LE, ok)
        ema = None if ema is None else balance_loads(config, ema, sums.load_LE, ok)
        loss_scale, scaling = update_loss_scale(state.loss_scale, loss, is_finite=is_finite, ok=ok, config=config.train)
        metrics = {
            'loss': loss,
            'tokens': sums.tokens,
            'grad_norm': grad_norm,
            'param_norm': jax.named_scope('optimizer')(param_norm)(params),
            **update_metrics,
            'skipped': ~ok,
            'spike': is_finite & ~ok,
            # An overflow in float16 is expected, and changes the loss scale.
            'bad': ~ok & ~scaling.get('overflow', jnp.bool_(False)),
            **({} if state.spike_window is None else {'window_steps': state.spike_window.filled}),
            **scaling,
            **{name: total / jnp.maximum(sums.part_counts[name], 1) for name, total in sums.parts.items()},
            **(sums.largest or {}),
            **({} if sums.load_LE is None else {'expert_load': sums.load_LE}),
            **({'source_loss': sums.source_loss, 'source_tokens': sums.source_tokens} if num_sources else {}),
        }
        counters = state.step + 1, state.skipped + ~ok, loss_scale, spike_window
        if hold is not None:
            before = state.step, state.skipped, state.loss_scale, state.spike_window
            counters = jax.tree.map(lambda new, old: jnp.where(hold, old, new), counters, before)
        step, skipped, loss_scale, spike_window = counters
        after = TrainState(step, skipped, params, opt_state, ema, loss_scale, spike_window)
        if state.fp8_history is not None:
            after = after._replace(fp8_history=record_maxima(state.fp8_history, maxima, ok))
        return after._replace(reference=state.reference, progress=state.progress), metrics

    return train_step


def make_eval_step(
    config: Config, layout: Layout, num_sources: int = 0
) -> Callable[[Params, Params | None, Batch], LossSums]:
    """Returns the evaluation step: (params, reference, batch) → sums over the batch.

    It has no dropout, z-loss, multi-token prediction or distillation. The argument `reference` is
    `TrainState.reference`. With `train.loss`, the step computes the cross-entropy, whose values are comparable between
    runs.
    """
    train = dataclasses.replace(config.train, z_loss=0.0, loss='', mtp_loss_weight=0.0)
    model = dataclasses.replace(config.model, fp8_head=False)
    config = dataclasses.replace(config, model=model, train=train, teacher=None, distill=DistillConfig())
    with_reference_point = make_reference_point(config, layout)
    objective = make_objective(config, layout, num_sources)

    def eval_step(params: Params, reference: Params | None, batch: Batch) -> LossSums:
        batch = with_reference_point(params, reference, batch)
        reference = reference_params(config, params, reference)

        def accumulate(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            return add_sums(sums, objective(params, reference, None, micro_batch, None)[1]), None

        micro_batches = split_micro_batches(batch, config.rounds, layout)
        sums, _ = jax.lax.scan(accumulate, zero_sums(config, num_sources), micro_batches)
        return sums

    return eval_step
