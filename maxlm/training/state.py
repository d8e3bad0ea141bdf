"""The training state: its arrays, their shardings and their initial values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from maxlm.config.schema import UNDECIDED_STEPS, Config
from maxlm.errors import InputError
from maxlm.model.decoder import Decoder
from maxlm.model.layers.linear import Linear
from maxlm.model.layers.weight_only_quantization import weights_of
from maxlm.model.parameters import kind_of
from maxlm.parallel.host_offload import HOST
from maxlm.parallel.layout import Layout
from maxlm.parallel.partitioning import Partitioning
from maxlm.training.fp8_history import Projections, first_fp8_history
from maxlm.training.loss_scale import LossScale, first_loss_scale
from maxlm.training.optimizers.optimizer import make_optimizer
from maxlm.training.optimizers.parameter_groups import check_groups
from maxlm.training.optimizers.schedule import Progress, RunFractions, make_schedule
from maxlm.training.optimizers.state_placement import place_state
from maxlm.training.optimizers.trainable import check_patterns, param_paths, trainable
from maxlm.training.optimizers.user_optimizer import Parameter, check_optimizer, user_optimizer
from maxlm.training.reference import has_reference_params, reference_config, stored_dtype, to_reference
from maxlm.training.spike_guard import SpikeStatistics, first_spike_window

Params = Any  # nested dict of arrays
Metrics = dict[str, jax.Array]  # scalars; metrics per source: [S]


class TrainState(NamedTuple):
    """State of training.

    Attributes:
        step: number of batches seen, including skipped ones. It is also the position in the data.
        skipped: number of batches whose step was skipped because of a spike or a non-finite value.
        params: parameters of the model.
        opt_state: state of the optimizer.
        ema: moving average of the parameters; None unless `optimizer.ema_decay` is set.
        loss_scale: state of the loss scale; None unless `model.dtype` is float16.
        spike_window: spike statistics; None unless `guard.spike_window` is set.
        reference: parameters of the reference model; None unless `has_reference_params`. They never change and are
            not part of a checkpoint: a resumed run reads them from `train.init_from` or `distill.teacher`.
        progress: progress of the schedule; None unless `train.hours` or `train.dollars` gives the run length. It
            changes between steps and is not part of a checkpoint: it follows from the decisions of the run.
        fp8_history: largest elements of the last good steps (`maxlm.training.fp8_history`); None unless
            `model.fp8_scaling` is delayed.
    """

    step: jax.Array
    skipped: jax.Array
    params: Params
    opt_state: optax.OptState
    ema: Params | None = None
    loss_scale: LossScale | None = None
    spike_window: SpikeStatistics | None = None
    reference: Params | None = None
    progress: Progress | None = None
    fp8_history: jax.Array | None = None


def evaluated_params(state: TrainState) -> Params:
    """Returns the parameters for evaluation and export: their moving average if the run has one."""
    return state.params if state.ema is None else state.ema


@functools.lru_cache(maxsize=16)
def abstract_model(config: Config, partitioning: Partitioning) -> Decoder:
    """Returns the decoder with shapes in place of parameters.

    The result is cached, because a run needs it about twenty times before its first step, at about 0.1 s per call.
    Callers must not modify it.
    """
    return nnx.eval_shape(lambda: _make_model(config, partitioning))


@functools.lru_cache(maxsize=4)
def abstract_fp8_model(config: Config, partitioning: Partitioning) -> tuple[Decoder, Projections]:
    """Returns the decoder for `with_fp8_inputs`, with shapes in place of arrays, and its projections in FP8."""
    model = nnx.eval_shape(lambda: _make_model(config, partitioning))
    linears = {path: module for path, module in nnx.iter_modules(model) if isinstance(module, Linear)}
    return model, {
        tuple(map(str, path)): linear.add_delayed_scaling(has_kernels=config.model.fp8_kernel == 'pallas')
        for path, linear in sorted(linears.items())
        if linear.matmul == 'fp8'
    }


def _first_fp8_history(config: Config, layout: Layout) -> jax.Array | None:
    if config.model.fp8_scaling == 'current':
        return None
    return first_fp8_history(abstract_fp8_model(config, layout)[1], config.model.fp8_history)


def _make_model(config: Config, partitioning: Partitioning) -> Decoder:
    return Decoder(config.model, rngs=nnx.Rngs(config.train.seed), partitioning=partitioning)


def param_shardings(config: Config, layout: Layout) -> Params:
    """Returns the sharding of each parameter.

    Raises:
        InputError: a parameter does not divide over the mesh.
    """
    _, variables = nnx.split(abstract_model(config, layout))

    def place(path: tuple[Any, ...], variable: nnx.Variable[jax.Array]) -> NamedSharding:
        return layout.parameter('.'.join(map(str, path)), variable.shape, variable.axes)

    return nnx.to_pure_dict(nnx.map_state(place, variables))


def abstract_state(config: Config, layout: Layout, optimizer: optax.GradientTransformation | None = None) -> TrainState:
    """Returns the shapes, dtypes and shardings of the training state.

    Args:
        config: resolved config.
        layout: layout of the devices.
        optimizer: optimizer in place of that of the config.

    Raises:
        InputError: a parameter does not divide over the mesh, a pattern in `optimizer.frozen_params`,
            `optimizer.trainable_params` or `optimizer.groups` matches no parameter, or an optimizer of the user is not
            usable.
    """
    params = abstract_params(config, layout)
    check_patterns(config, param_paths(params))
    check_groups(config, param_paths(params))

    def replicated(initial: Callable[[], Any]) -> Any:
        return jax.tree.map(lambda x: x.update(sharding=layout.named()), jax.eval_shape(initial))

    trained, offload = trainable(config, params), config.mesh.host_offload
    if optimizer is None and not config.optimizer.is_function:
        opt_state = jax.eval_shape(optimizer_of(config, layout).init, trained)
    elif offload != 'none':
        raise InputError(f'mesh.host_offload={offload}: not with an optimizer of your own; set mesh.host_offload=none')
    else:
        name = config.optimizer.name if optimizer is None else 'of make_train_step'
        opt_state = check_optimizer(optimizer or optimizer_of(config, layout), trained, name=name)
    opt_state = place_state(
        opt_state,
        _described_params(config, layout),
        trainable(config, param_shardings(config, layout.of_state)),
        layout.of_state,
        on_host=offload != 'none',
    )
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.named())
    ema = params if config.optimizer.ema_decay else None
    scale = replicated(lambda: first_loss_scale(config.train)) if config.model.dtype == 'float16' else None
    spike_window = replicated(lambda: first_spike_window(config.guard))
    reference = None
    if has_reference_params(config):
        other = reference_config(config)
        reference = jax.tree_util.tree_map_with_path(
            lambda path, param: param.update(dtype=stored_dtype(other, kind_of(path), param.dtype)),
            abstract_params(other, layout),
        )
    progress = replicated(lambda: _first_progress(config))
    history = replicated(lambda: _first_fp8_history(config, layout))
    return TrainState(counter, counter, params, opt_state, ema, scale, spike_window, reference, progress, history)


def abstract_params(config: Config, layout: Layout) -> Params:
    """Returns the shapes, dtypes and shardings of the parameters."""
    _, variables = nnx.split(abstract_model(config, layout))
    shapes = nnx.to_pure_dict(nnx.map_state(lambda _, variable: variable.get_value(), variables))
    memory = HOST if config.mesh.host_offload == 'all' else 'device'

    def place(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding.with_memory_kind(memory))

    return jax.tree.map(place, shapes, param_shardings(config, layout.of_state))


def init_state(
    config: Config,
    layout: Layout,
    *,
    optimizer: optax.GradientTransformation | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> TrainState:
    """Returns the state before the first step, created in place on the mesh.

    If the state has a reference, it is a copy of the initial parameters, or None in place of a teacher. Quantized
    kernels are 0, because a run reads them from a checkpoint, and random kernels would need memory in float32.

    Args:
        config: resolved config.
        layout: layout of the devices.
        optimizer: optimizer in place of that of the config, as in `make_train_step`.
        compiler_options: XLA options of the program. JAX accepts them only outside of other traced functions.

    Raises:
        InputError: see `abstract_state`.
    """
    abstract = abstract_state(dataclasses.replace(config, teacher=None), layout, optimizer)
    initialize = (optimizer or optimizer_of(config, layout)).init
    copies_params = has_reference_params(config) and config.teacher is None

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(_make_model(config, layout)))
        if weights_of(config.model) is not None:
            params = jax.tree_util.tree_map_with_path(
                lambda path, param: jnp.zeros_like(param) if kind_of(path) == 'codes' else param, params
            )
        zero = jnp.zeros((), jnp.int32)
        ema = params if config.optimizer.ema_decay else None
        scale = first_loss_scale(config.train) if config.model.dtype == 'float16' else None
        reference = to_reference(config, params) if copies_params else None
        opt_state = initialize(trainable(config, params))
        spike_window, progress = first_spike_window(config.guard), _first_progress(config)
        history = _first_fp8_history(config, layout)
        return TrainState(zero, zero, params, opt_state, ema, scale, spike_window, reference, progress, history)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    state: TrainState = jax.jit(init, out_shardings=shardings, compiler_options=compiler_options)()
    return state


def with_progress(state: TrainState, progress: Progress, layout: Layout) -> TrainState:
    """Returns the state with new schedule progress, given as Python numbers that are equal in all processes."""
    return state._replace(progress=jax.device_put(jax.tree.map(np.float32, progress), layout.named()))


def _first_progress(config: Config) -> Progress | None:
    if not config.by_budget:
        return None
    numbers = (0, 0, UNDECIDED_STEPS, config.optimizer.warmup_steps / UNDECIDED_STEPS)
    return Progress(*map(jnp.float32, numbers))


def init_opt_state(config: Config, layout: Layout, abstract: TrainState, params: Params) -> optax.OptState:
    """Returns the initial optimizer state for parameters of a checkpoint, some of which it may contain."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.opt_state)
    init = jax.jit(optimizer_of(config, layout).init, out_shardings=shardings)
    state: optax.OptState = init(trainable(config, params))
    return state


def optimizer_of(
    config: Config,
    layout: Layout,
    schedule: optax.Schedule | None = None,
    fractions: RunFractions | None = None,
) -> optax.GradientTransformation:
    """Returns the optimizer of a config's model; see `make_optimizer` and `user_optimizer`.

    Args:
        config: resolved config.
        layout: layout of the devices.
        schedule: schedule of the learning rate; None selects the config's schedule for `train.num_steps`.
        fractions: completed fractions of the run; None selects those of `train.num_steps`.
    """
    schedule = schedule or make_schedule(config.optimizer, config.train.num_steps)
    if config.optimizer.is_function:
        return user_optimizer(config.optimizer, schedule, _described_params(config, layout), layout.of_state)
    _, variables = nnx.split(abstract_model(config, layout))
    axes = {tuple(map(str, path)): variable.axes for path, variable in nnx.to_flat_state(variables)}
    return make_optimizer(config, axes, layout.of_state, schedule, fractions)


def ignores_schedule(config: Config, layout: Layout) -> bool:
    """Returns True if an update of the config's optimizer does not use the learning rate of the schedule."""
    schedule, counts = make_schedule(config.optimizer, config.train.num_steps), []

    def counted(count: Any) -> Any:
        counts.append(count)
        return schedule(count)

    optimizer, params = optimizer_of(config, layout, counted), trainable(config, abstract_params(config, layout))
    state = jax.eval_shape(optimizer.init, params)
    counts.clear()
    jax.eval_shape(optimizer.update, params, state, params)
    return not counts


def _described_params(config: Config, layout: Layout) -> Any:
    """Returns the tree of the trainable parameters with a `Parameter` in place of each array."""
    _, variables = nnx.split(abstract_model(config, layout))

    def describe(path: tuple[Any, ...], variable: nnx.Variable[jax.Array]) -> Parameter:
        array: Any = variable.get_value()
        kind = kind_of(tuple(map(jax.tree_util.DictKey, map(str, path))))
        return Parameter('.'.join(map(str, path)), array.shape, array.dtype, tuple(variable.axes), kind)

    return trainable(config, nnx.to_pure_dict(nnx.map_state(describe, variables)))
