"""The training step: the whole algorithm on one screen, a pure function of (state, batch).

Shapes: A micro-batches, B batch, T length, D dim, S sources.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from maxlm.config.keys import Config
from maxlm.model.blocks import BLOCKS
from maxlm.model.decoder import Decoder
from maxlm.model.host_memory import HOST, fetch, on_host
from maxlm.model.ring import zigzag
from maxlm.training.guards import SpikeWindow, first_window, judge
from maxlm.training.loss import cross_entropy
from maxlm.training.loss_scale import LossScale, first_loss_scale, next_loss_scale
from maxlm.training.moments import Blocks, place_moment
from maxlm.training.offload import layer_by_layer, norm
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
    # Batches that spiked or were not finite and therefore changed nothing else.
    skipped: jax.Array
    params: Params
    opt_state: optax.OptState
    # Moving average of the parameters, where optimizer.ema_decay is set.
    ema: Params | None = None
    # Where model.dtype is float16.
    loss_scale: LossScale | None = None
    # Where guard.window is set.
    window: SpikeWindow | None = None


class LossSums(NamedTuple):
    """Sums over the predicted tokens of a batch."""

    # Cross-entropy in nats.
    loss: jax.Array
    # log² Z, see `Losses`.
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
    loss_sums = make_loss_sums(config, layout, num_sources, z_loss=config.train.z_loss)
    schedule = make_schedule(config.optimizer, config.train.num_steps)
    optimizer = _make_optimizer(config, layout)
    A, clip_norm, z_loss = config.rounds, config.optimizer.clip_norm, config.train.z_loss
    gradient_shardings = param_shardings(config, layout.of_gradients)
    moment_shardings = param_shardings(config, layout.of_moments)

    def objective(
        wanted: Params, params: Params, batch: Batch, dropout_key: jax.Array, factor: jax.Array | None
    ) -> tuple[jax.Array, LossSums]:
        # Gradients of parameters in host memory are those of what stands in for them on the device.
        slots = wanted if config.mesh.offload == 'all' else None
        loss, sums = loss_sums(wanted if slots is None else params, slots, batch, dropout_key)
        return (loss if factor is None else factor * loss), sums

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        factor = None
        if state.loss_scale is not None:
            # Of a mean and not of a sum, whose gradients would leave float16 at the other end.
            factor = state.loss_scale.scale * (A / batch['tokens'].size)

        def add_micro_batch(totals: Any, inputs: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, micro_batch = inputs
            dropout_key = jax.random.fold_in(key, index)
            differentiate = jax.value_and_grad(objective, has_aux=True)
            wanted = no_grads if config.mesh.offload == 'all' else state.params
            (_, sums), grads = differentiate(wanted, state.params, micro_batch, dropout_key, factor)
            grads = jax.lax.with_sharding_constraint(grads, gradient_shardings)
            return jax.tree.map(jnp.add, totals, (sums, grads)), None

        no_grads = jax.tree.map(lambda param: jnp.zeros(param.shape, param.dtype), state.params)
        no_grads = jax.lax.with_sharding_constraint(no_grads, gradient_shardings)
        zeros = (LossSums.zeros(num_sources), no_grads)
        micro_batches = {name: split_micro_batches(rows, A, layout) for name, rows in batch.items()}
        (sums, grads), _ = jax.lax.scan(add_micro_batch, zeros, (jnp.arange(A), micro_batches))

        # Sums until here, so that every token counts the same, wherever the micro-batches were cut.
        tokens = jnp.maximum(sums.tokens, 1)
        means = jax.tree.map(lambda x: x / tokens, sums)
        grads = jax.lax.with_sharding_constraint(grads, moment_shardings)
        # One multiplication makes them means, takes out the loss scale, and clips.
        scale = 1 / tokens if factor is None else 1 / (tokens * factor)
        grad_norm = scale * optax.tree.norm(grads)
        if clip_norm:
            scale *= jnp.minimum(1, clip_norm / jnp.maximum(grad_norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
        num_updates = state.step - state.skipped
        finite = jnp.isfinite(means.loss) & jnp.isfinite(grad_norm)
        ok, window = judge(state.window, means.loss, grad_norm, config.guard)

        def update(grads: Params, params: Params, opt_state: Any, ema: Params | None) -> tuple[Any, ...]:
            old = params, opt_state, ema
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            ema = _average(ema, params, decay=config.optimizer.ema_decay, num_updates=num_updates + 1)
            # A selection, not a product with 0: NaN times 0 is NaN.
            return jax.tree.map(lambda new, old: jnp.where(ok, new, old), (params, opt_state, ema), old)

        if config.mesh.offload != 'none':
            update = layer_by_layer(update)
        params, opt_state, ema = update(grads, state.params, state.opt_state, state.ema)
        loss_scale, scaling = state.loss_scale, {}
        if loss_scale is not None:
            # A loss that is not finite itself, or a gradient that is not without a scale, is no matter of the scale.
            overflow = ~finite & jnp.isfinite(means.loss) & (loss_scale.scale > 1)
            scaling = {'loss_scale': loss_scale.scale, 'overflow': overflow}
            after = next_loss_scale(loss_scale, overflow, config.train)
            loss_scale = jax.tree.map(lambda new, old: jnp.where(ok | overflow, new, old), after, loss_scale)
        metrics = {
            'loss': means.loss,
            'tokens': sums.tokens,
            'grad_norm': grad_norm,
            'param_norm': norm(params) if config.mesh.offload == 'all' else optax.tree.norm(params),
            'learning_rate': schedule(num_updates),
            'skipped': ~ok,
            'spike': finite & ~ok,
            **scaling,
            **({'z_loss': z_loss * means.log_z_squared} if z_loss else {}),
            **({'source_loss': sums.source_loss, 'source_tokens': sums.source_tokens} if num_sources else {}),
        }
        return TrainState(state.step + 1, state.skipped + ~ok, params, opt_state, ema, loss_scale, window), metrics

    return train_step


def make_eval_step(config: Config, layout: Layout, num_sources: int = 0) -> Callable[[Params, Batch], LossSums]:
    """(params, batch) → sums over the batch's predicted tokens, without dropout."""
    loss_sums = make_loss_sums(config, layout, num_sources)
    A = config.rounds

    def eval_step(params: Params, batch: Batch) -> LossSums:
        micro_batches = {name: split_micro_batches(rows, A, layout) for name, rows in batch.items()}

        def add_micro_batch(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, loss_sums(params, None, micro_batch, None)[1]), None

        sums, _ = jax.lax.scan(add_micro_batch, LossSums.zeros(num_sources), micro_batches)
        return sums

    return eval_step


def evaluated_params(state: TrainState) -> Params:
    """The parameters that are evaluated and used: their moving average where there is one."""
    return state.params if state.ema is None else state.ema


def make_loss_sums(
    config: Config, layout: Layout, num_sources: int = 0, *, z_loss: float = 0.0
) -> Callable[[Params, Params | None, Batch, jax.Array | None], tuple[jax.Array, LossSums]]:
    """(params, slots, batch, dropout key) → what is minimized, and sums over the predicted tokens; slots: see `fetch`.

    Both are sums over the batch's predicted tokens; the first alone has a gradient.
    """
    graph, _ = nnx.split(abstract_model(config, layout))
    pipelined = config.accumulation // config.rounds

    def loss_sums(
        params: Params, slots: Params | None, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LossSums]:
        blocks_slots = None
        assert slots is None or any(map(on_host, jax.tree.leaves(params))), 'slots stand in for parameters on the host'
        if any(map(on_host, jax.tree.leaves(params))):
            # The blocks come a layer at a time.
            blocks_slots = None if slots is None else slots[BLOCKS]
            rest = {name: fetch(tree, slots and slots[name]) for name, tree in params.items() if name != BLOCKS}
            params = {**rest, BLOCKS: params[BLOCKS]}
        model = nnx.merge(graph, params)
        hidden_BTD, _ = model(
            batch['tokens'],
            segments_BT=batch['segments'] if config.data.isolate_documents else None,
            positions_BT=batch['positions'],
            dropout_key=dropout_key,
            micro_batches=pipelined,
            slots=blocks_slots,
        )
        targets_BT, weights_BT = (layout.constrain(batch[name], ('rows', 'length')) for name in ('targets', 'weights'))
        objective, loss_B, log_z_squared_B = cross_entropy(
            layout.constrain(hidden_BTD, ('rows', 'length', 'activation')),
            model.output_kernel(),
            targets_BT,
            weights_BT,
            placement=layout,
            chunk=config.train.loss_chunk,
            z_loss=z_loss,
            logit_softcap=config.model.logit_softcap,
            # As many rows at a time as a micro-batch has; the stages of a pipeline share them.
            row_groups=max(1, pipelined // layout.parts('layers')),
        )
        tokens_B = batch['weights'].sum(axis=1)
        by_source = [jnp.zeros(0)] * 2
        if num_sources:
            is_from_BS = batch['sources'][:, None] == jnp.arange(num_sources)
            # A selection: the loss of a row that is not finite stays with its own source.
            by_source = [jnp.where(is_from_BS, rows[:, None], 0).sum(axis=0) for rows in (loss_B, tokens_B)]
        return objective, LossSums(loss_B.sum(), log_z_squared_B.sum(), tokens_B.sum(), *by_source)

    return loss_sums


def split_micro_batches(rows: jax.Array, num: int, layout: Layout) -> jax.Array:
    """[B, T] → [A, B/A, T], or [B] → [A, B/A]. Row r goes to micro-batch r mod A, so that no row changes its device.

    Where the length is split over devices, its order is then that of `zigzag`.
    """
    axes = ('micro_batch', 'batch', 'length')[: rows.ndim + 1]
    if rows.ndim == 2 and layout.parts('length') > 1:
        rows = rows[:, zigzag(rows.shape[1], layout.parts('length'))]
    return layout.constrain(rows.reshape(-1, num, *rows.shape[1:]).swapaxes(0, 1), axes)


@functools.lru_cache(maxsize=16)
def abstract_model(config: Config, layout: Layout) -> Decoder:
    """The decoder with shapes in place of parameters; not to be changed, for it is the same at every call.

    Before its first step a run asks for it twenty times, a tenth of a second each.
    """
    return nnx.eval_shape(lambda: _make_model(config, layout))


def _make_model(config: Config, layout: Layout) -> Decoder:
    return Decoder(config.model, rngs=nnx.Rngs(config.train.seed), placement=layout)


def param_shardings(config: Config, layout: Layout) -> Params:
    """Where a layout has each parameter.

    Raises:
        InputError: a parameter does not divide over the mesh.
    """
    _, variables = nnx.split(abstract_model(config, layout))

    def place(path: tuple[Any, ...], variable: nnx.Variable) -> NamedSharding:
        return layout.parameter('.'.join(map(str, path)), variable.shape, variable.axes)

    return nnx.to_pure_dict(nnx.map_state(place, variables))


def abstract_state(config: Config, layout: Layout) -> TrainState:
    """The state's shapes, types and shardings.

    Raises:
        InputError: a parameter does not divide over the mesh.
    """
    _, variables = nnx.split(abstract_model(config, layout))
    shapes = nnx.to_pure_dict(nnx.map_state(lambda _, variable: variable.get_value(), variables))

    def placed(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    memory = HOST if config.mesh.offload == 'all' else 'device'
    params = jax.tree.map(
        lambda shape, sharding: placed(shape, sharding.with_memory_kind(memory)),
        shapes,
        param_shardings(config, layout),
    )
    optimizer = _make_optimizer(config, layout)

    offloaded = config.mesh.offload != 'none'

    def place(moment: Any, sharding: NamedSharding) -> Any:
        # A masked one is another optimizer's parameter.
        if isinstance(moment, optax.MaskedNode):
            return moment
        return place_moment(moment, sharding.with_memory_kind(HOST) if offloaded else sharding)

    # Counters are everywhere.
    opt_state = optax.tree.map_params(
        optimizer,
        place,
        jax.eval_shape(optimizer.init, params),
        param_shardings(config, layout.of_moments),
        transform_non_params=lambda x: placed(x, layout.named()),
        is_leaf=lambda x: isinstance(x, (optax.MaskedNode, Blocks)),
    )
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.named())
    ema = params if config.optimizer.ema_decay else None
    scale: Any = None
    if config.model.dtype == 'float16':
        scale = jax.tree.map(
            lambda x: placed(x, layout.named()), jax.eval_shape(lambda: first_loss_scale(config.train))
        )
    window = jax.tree.map(lambda x: placed(x, layout.named()), jax.eval_shape(lambda: first_window(config.guard)))
    return TrainState(counter, counter, params, opt_state, ema, scale, window)


def init_state(config: Config, layout: Layout) -> TrainState:
    """The state before the first step, made in place on the mesh."""
    optimizer = _make_optimizer(config, layout)

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(_make_model(config, layout)))
        zero = jnp.zeros((), jnp.int32)
        ema = params if config.optimizer.ema_decay else None
        scale = first_loss_scale(config.train) if config.model.dtype == 'float16' else None
        return TrainState(zero, zero, params, optimizer.init(params), ema, scale, first_window(config.guard))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, layout))
    return jax.jit(init, out_shardings=shardings)()


def _make_optimizer(config: Config, layout: Layout) -> optax.GradientTransformation:
    _, variables = nnx.split(abstract_model(config, layout))
    axes = {tuple(map(str, path)): variable.axes for path, variable in nnx.to_flat_state(variables)}
    return make_optimizer(config, axes, layout.of_moments)


def _average(ema: Params | None, params: Params, *, decay: float, num_updates: jax.Array) -> Params | None:
    """The moving average after the update that is number `num_updates`, from 1.

    Its memory is a part of the run so far at first, or it would hold on to the initial parameters for 1 / (1 - decay)
    updates; as TensorFlow's ExponentialMovingAverage does with `num_updates`.
    """
    if ema is None:
        return None
    decay_now = jnp.minimum(decay, (1 + num_updates) / (10 + num_updates))
    return jax.tree.map(lambda average, param: decay_now * average + (1 - decay_now) * param, ema, params)
