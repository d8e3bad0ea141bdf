"""The training step: the whole algorithm on one screen, a pure function of (state, batch).

Shapes: A micro-batches, B batch, T length, D dim, S sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlm.config.keys import Config
from maxlm.model.decoder import Decoder
from maxlm.training.loss import cross_entropy_sum
from maxlm.training.optimizer import make_optimizer
from maxlm.training.schedule import make_schedule
from maxlm.training.sharding import Layout

Params = Any  # nested dict of arrays
Batch = dict[str, jax.Array]  # tokens, targets, weights, segments, positions: each [B, T]; perhaps sources: [B]
Metrics = dict[str, jax.Array]  # scalars; by source: [S]


class TrainState(NamedTuple):
    """All that training changes."""

    # Batches seen, skipped ones included: the position in the data.
    step: jax.Array
    # Batches whose gradient was not finite and which therefore changed nothing else.
    skipped: jax.Array
    params: Params
    opt_state: optax.OptState
    # Moving average of the parameters, where optimizer.ema_decay is set.
    ema: Params | None = None


class LossSums(NamedTuple):
    """Sums over the predicted tokens of a batch."""

    # Cross-entropy in nats.
    loss: jax.Array
    # log² Z, see `cross_entropy_sum`.
    log_z_squared: jax.Array
    # Their weights: how many there are.
    tokens: jax.Array
    # Of the rows of each source, where the batch tells them: loss and tokens, each [S].
    source_loss: jax.Array
    source_tokens: jax.Array

    @classmethod
    def zeros(cls, num_sources: int) -> LossSums:
        return cls(*jnp.zeros(3), *jnp.zeros((2, num_sources)))


def make_train_step(
    config: Config, layout: Layout, num_sources: int = 0
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a resolved config: one optimizer update from one global batch.

    With `num_sources` batches have `sources`, and metrics tell losses by source.
    """
    loss_sums = make_loss_sums(config, layout, num_sources)
    schedule = make_schedule(config.optimizer, config.train.num_steps)
    optimizer = _make_optimizer(config, layout)
    A, clip_norm, z_loss = config.accumulation, config.optimizer.clip_norm, config.train.z_loss

    def objective(params: Params, batch: Batch, dropout_key: jax.Array) -> tuple[jax.Array, LossSums]:
        sums = loss_sums(params, batch, dropout_key)
        return (sums.loss + z_loss * sums.log_z_squared if z_loss else sums.loss), sums

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)

        def add_micro_batch(totals: Any, inputs: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, micro_batch = inputs
            dropout_key = jax.random.fold_in(key, index)
            (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(state.params, micro_batch, dropout_key)
            return jax.tree.map(jnp.add, totals, (sums, grads)), None

        zeros = (LossSums.zeros(num_sources), jax.tree.map(jnp.zeros_like, state.params))
        micro_batches = {name: split_micro_batches(rows, A, layout) for name, rows in batch.items()}
        (sums, grads), _ = jax.lax.scan(add_micro_batch, zeros, (jnp.arange(A), micro_batches))

        # Sums until here, so that every token counts the same, wherever the micro-batches were cut.
        means, grads = jax.tree.map(lambda x: x / jnp.maximum(sums.tokens, 1), (sums, grads))
        grad_norm = optax.tree.norm(grads)
        if clip_norm:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, clip_norm / jnp.maximum(grad_norm, 1e-12)), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        num_updates = state.step - state.skipped
        ema = _average(state.ema, params, decay=config.optimizer.ema_decay, num_updates=num_updates + 1)

        # A selection, not a product with 0: NaN times 0 is NaN.
        finite = jnp.isfinite(means.loss) & jnp.isfinite(grad_norm)
        params, opt_state, ema = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state, ema),
            (state.params, state.opt_state, state.ema),
        )
        metrics = {
            'loss': means.loss,
            'tokens': sums.tokens,
            'grad_norm': grad_norm,
            'param_norm': optax.tree.norm(params),
            'learning_rate': schedule(num_updates),
            'skipped': ~finite,
            **({'z_loss': z_loss * means.log_z_squared} if z_loss else {}),
            **({'source_loss': sums.source_loss, 'source_tokens': sums.source_tokens} if num_sources else {}),
        }
        return TrainState(state.step + 1, state.skipped + ~finite, params, opt_state, ema), metrics

    return train_step


def make_eval_step(config: Config, layout: Layout, num_sources: int = 0) -> Callable[[Params, Batch], LossSums]:
    """(params, batch) → sums over the batch's predicted tokens, without dropout."""
    loss_sums = make_loss_sums(config, layout, num_sources)
    A = config.accumulation

    def eval_step(params: Params, batch: Batch) -> LossSums:
        micro_batches = {name: split_micro_batches(rows, A, layout) for name, rows in batch.items()}

        def add_micro_batch(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, loss_sums(params, micro_batch, None)), None

        sums, _ = jax.lax.scan(add_micro_batch, LossSums.zeros(num_sources), micro_batches)
        return sums

    return eval_step


def evaluated_params(state: TrainState) -> Params:
    """The parameters that are evaluated and used: their moving average where there is one."""
    return state.params if state.ema is None else state.ema


def make_loss_sums(
    config: Config, layout: Layout, num_sources: int = 0
) -> Callable[[Params, Batch, jax.Array | None], LossSums]:
    """(params, batch, dropout key) → sums over the batch's predicted tokens."""
    graph, _ = nnx.split(abstract_model(config, layout))

    def loss_sums(params: Params, batch: Batch, dropout_key: jax.Array | None) -> LossSums:
        model = nnx.merge(graph, params)
        hidden_BTD, _ = model(
            batch['tokens'],
            segments_BT=batch['segments'] if config.data.isolate_documents else None,
            positions_BT=batch['positions'],
            dropout_key=dropout_key,
        )
        loss_B, log_z_squared_B = cross_entropy_sum(
            hidden_BTD, batch['targets'], batch['weights'], logits=model.logits, chunk=config.train.loss_chunk
        )
        tokens_B = batch['weights'].sum(axis=1)
        by_source = [jnp.zeros(0)] * 2
        if num_sources:
            is_from_BS = batch['sources'][:, None] == jnp.arange(num_sources)
            # A selection: the loss of a row that is not finite stays with its own source.
            by_source = [jnp.where(is_from_BS, rows[:, None], 0).sum(axis=0) for rows in (loss_B, tokens_B)]
        return LossSums(loss_B.sum(), log_z_squared_B.sum(), tokens_B.sum(), *by_source)

    return loss_sums


def split_micro_batches(rows: jax.Array, num: int, layout: Layout) -> jax.Array:
    """[B, T] → [A, B/A, T], or [B] → [A, B/A]. Row r goes to micro-batch r mod A, so that no row changes its device."""
    axes = ('micro_batch', 'batch', 'length')[: rows.ndim + 1]
    return layout.constrain(rows.reshape(-1, num, *rows.shape[1:]).swapaxes(0, 1), axes)


def abstract_model(config: Config, layout: Layout) -> Decoder:
    """The decoder with shapes in place of parameters."""
    return nnx.eval_shape(lambda: _make_model(config, layout))


def _make_model(config: Config, layout: Layout) -> Decoder:
    return Decoder(config.model, rngs=nnx.Rngs(config.train.seed), constrain=layout.constrain)


def abstract_state(config: Config, layout: Layout) -> TrainState:
    """The state's shapes, types and shardings.

    Raises:
        InputError: a parameter does not divide over the mesh.
    """
    _, variables = nnx.split(abstract_model(config, layout))

    def place(path: tuple[Any, ...], variable: nnx.Variable) -> jax.ShapeDtypeStruct:
        name = '.'.join(map(str, path))
        sharding = layout.parameter(name, variable.shape, variable.axes)
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)

    params = nnx.to_pure_dict(nnx.map_state(place, variables))
    optimizer = _make_optimizer(config, layout)

    def place_moment(moment: Any, param: Any) -> Any:
        if isinstance(moment, optax.MaskedNode):  # Another optimizer's parameter.
            return moment
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=param.sharding)

    # Moments lie where their parameters lie; counters are everywhere.
    opt_state = optax.tree.map_params(
        optimizer,
        place_moment,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.named()),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.named())
    return TrainState(counter, counter, params, opt_state, params if config.optimizer.ema_decay else None)


def init_state(config: Config, layout: Layout) -> TrainState:
    """The state before the first step, made in place on the mesh."""
    optimizer = _make_optimizer(config, layout)

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(_make_model(config, layout)))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, zero, params, optimizer.init(params), params if config.optimizer.ema_decay else None)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, layout))
    return jax.jit(init, out_shardings=shardings)()


def _make_optimizer(config: Config, layout: Layout) -> optax.GradientTransformation:
    _, variables = nnx.split(abstract_model(config, layout))
    axes = {tuple(map(str, path)): variable.axes for path, variable in nnx.to_flat_state(variables)}
    return make_optimizer(config, axes, layout)


def _average(ema: Params | None, params: Params, *, decay: float, num_updates: jax.Array) -> Params | None:
    """The moving average after the update that is number `num_updates`, from 1.

    Its memory is a part of the run so far at first, or it would hold on to the initial parameters for 1 / (1 - decay)
    updates; as TensorFlow's ExponentialMovingAverage does with `num_updates`.
    """
    if ema is None:
        return None
    decay_now = jnp.minimum(decay, (1 + num_updates) / (10 + num_updates))
    return jax.tree.map(lambda average, param: decay_now * average + (1 - decay_now) * param, ema, params)
