"""The training step: the whole algorithm on one screen, a pure function of (state, batch).

Shapes: A micro-batches, B batch, T length, D dim.
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
from maxlm.training.optimizer import make_optimizer, make_schedule
from maxlm.training.sharding import Layout

Params = Any  # nested dict of arrays
Batch = dict[str, jax.Array]  # tokens, targets, weights, segments, positions: each [B, T]
Metrics = dict[str, jax.Array]  # scalars


class TrainState(NamedTuple):
    """All that training changes."""

    # Batches seen, skipped ones included: the position in the data.
    step: jax.Array
    # Batches whose gradient was not finite and which therefore changed nothing else.
    skipped: jax.Array
    params: Params
    opt_state: optax.OptState


def make_train_step(config: Config, layout: Layout) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a resolved config: one optimizer update from one global batch."""
    loss_sum = make_loss_sum(config, layout)
    schedule = make_schedule(config.optimizer, config.train.num_steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    A, clip_norm = config.accumulation, config.optimizer.clip_norm

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)

        def add_micro_batch(sums: Any, inputs: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, micro_batch = inputs
            dropout_key = jax.random.fold_in(key, index)
            outputs = jax.value_and_grad(loss_sum, has_aux=True)(state.params, micro_batch, dropout_key)
            return jax.tree.map(jnp.add, sums, outputs), None

        zeros = ((jnp.zeros(()), jnp.zeros(())), jax.tree.map(jnp.zeros_like, state.params))
        micro_batches = {name: split_micro_batches(x_BT, A, layout) for name, x_BT in batch.items()}
        ((loss, tokens), grads), _ = jax.lax.scan(add_micro_batch, zeros, (jnp.arange(A), micro_batches))

        # Sums until here, so that every token counts the same, wherever the micro-batches were cut.
        loss, grads = jax.tree.map(lambda x: x / jnp.maximum(tokens, 1), (loss, grads))
        grad_norm = optax.tree.norm(grads)
        if clip_norm:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, clip_norm / jnp.maximum(grad_norm, 1e-12)), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        # A selection, not a product with 0: NaN times 0 is NaN.
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics = {
            'loss': loss,
            'tokens': tokens,
            'grad_norm': grad_norm,
            'param_norm': optax.tree.norm(params),
            'learning_rate': schedule(state.step - state.skipped),
            'skipped': ~finite,
        }
        return TrainState(state.step + 1, state.skipped + ~finite, params, opt_state), metrics

    return train_step


def make_eval_step(config: Config, layout: Layout) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """(params, batch) → (sum of losses in nats, number of predicted tokens), without dropout."""
    loss_sum = make_loss_sum(config, layout)
    A = config.accumulation

    def eval_step(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        micro_batches = {name: split_micro_batches(x_BT, A, layout) for name, x_BT in batch.items()}

        def add_micro_batch(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, loss_sum(params, micro_batch, None)), None

        sums, _ = jax.lax.scan(add_micro_batch, (jnp.zeros(()), jnp.zeros(())), micro_batches)
        return sums

    return eval_step


def make_loss_sum(
    config: Config, layout: Layout
) -> Callable[[Params, Batch, jax.Array | None], tuple[jax.Array, jax.Array]]:
    """(params, batch, dropout key) → (sum of losses in nats, number of predicted tokens)."""
    graph, _ = nnx.split(abstract_model(config, layout))

    def loss_sum(params: Params, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, params)
        hidden_BTD, _ = model(
            batch['tokens'],
            segments_BT=batch['segments'] if config.data.isolate_documents else None,
            positions_BT=batch['positions'],
            dropout_key=dropout_key,
        )
        loss = cross_entropy_sum(
            hidden_BTD, batch['targets'], batch['weights'], logits=model.logits, chunk=config.train.loss_chunk
        )
        return loss, batch['weights'].sum()

    return loss_sum


def split_micro_batches(x_BT: jax.Array, num: int, layout: Layout) -> jax.Array:
    """[B, T] → [A, B/A, T]. Row r goes to micro-batch r mod A, so that no row changes its device."""
    B, T = x_BT.shape
    return layout.constrain(x_BT.reshape(B // num, num, T).swapaxes(0, 1), ('micro_batch', 'batch', 'length'))


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
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, config.train.num_steps))
    # Moments lie where their parameters lie; counters are everywhere.
    opt_state = optax.tree.map_params(
        optimizer,
        lambda moment, param: jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=param.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.named()),
    )
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.named())
    return TrainState(counter, counter, params, opt_state)


def init_state(config: Config, layout: Layout) -> TrainState:
    """The state before the first step, made in place on the mesh."""
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, config.train.num_steps))

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(_make_model(config, layout)))
        return TrainState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), params, optimizer.init(params))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, layout))
    return jax.jit(init, out_shardings=shardings)()
