"""The optimizer update of a training step: gradient clipping, parameters, optimizer state and EMA of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.config.schema import Config
from maxlm.model.blocks import BLOCKS, STACKS
from maxlm.model.experts.router import BALANCE_BIAS, ROUTER
from maxlm.model.layers.weight_only_quantization import KERNEL
from maxlm.parallel.layout import Layout
from maxlm.training.fp8_history import NO_FP8_INPUTS, Fp8Inputs, fp8_inputs, kernel_shardings
from maxlm.training.optimizers.offload import layer_by_layer
from maxlm.training.optimizers.schedule import RunFractions, make_run_fractions, make_schedule
from maxlm.training.optimizers.trainable import merge_trainable, trainable
from maxlm.training.optimizers.update_metrics import update_metrics
from maxlm.training.state import Metrics, Params, TrainState, abstract_fp8_model, optimizer_of, param_shardings

# (state, gradients, ok) → parameters, optimizer state, moving average and metrics.
Update = Callable[[TrainState, Params, jax.Array], tuple[Params, Any, Params | None, Metrics]]


def differentiable(config: Config, params: Params, zero_grads: Params) -> Params:
    """Returns the arrays with respect to which the loss is differentiated.

    These are the trainable parameters. For parameters in host memory they are zeros on the device that receive the
    gradients (see `maxlm.parallel.host_offload.fetch`).
    """
    return zero_grads if config.mesh.host_offload == 'all' else trainable(config, params)


def merge_differentiable(config: Config, params: Params, diff_params: Params) -> tuple[Params, Params | None]:
    """Returns the model's parameters and, if they are in host memory, the arrays that receive their gradients."""
    if config.mesh.host_offload == 'all':
        return params, diff_params
    return merge_trainable(params, diff_params), None


def working_params(config: Config, layout: Layout, params: Params) -> Params:
    """Returns the parameters that the micro-batches use.

    The kernels of the blocks are cast to `model.dtype` once, instead of in every micro-batch. Their gradients are then
    in this dtype as well, with the values that the cast within the model gives. Kernels that FP8 quantizes from float32
    in the model are not cast; with delayed scaling, see `working_fp8_inputs`. Below ZeRO stage 3, the parameters are
    also gathered once, as in ZeRO-1 and ZeRO-2 with mixed precision (Rajbhandari et al. 2020). Parameters in host
    memory are returned as they are.
    """
    if config.mesh.host_offload == 'all':
        return params
    dtype = jnp.dtype(config.model.dtype)

    def cast(path: tuple[Any, ...], param: jax.Array) -> jax.Array:
        names = [entry.key for entry in path]
        # The router computes in float32.
        is_kernel = names[0] in STACKS and names[-1] == KERNEL and ROUTER not in names
        return param.astype(dtype) if is_kernel else param

    if config.model.matmul_precision != 'fp8' or config.model.fp8_scaling == 'delayed':
        with jax.named_scope('cast'):
            params = jax.tree_util.tree_map_with_path(cast, params)
    if layout.zero == 3:
        return params
    # Otherwise XLA would gather the parameters before the cast.
    params = jax.lax.with_sharding_constraint(params, param_shardings(config, layout.of_state))
    return jax.lax.with_sharding_constraint(params, param_shardings(config, layout))


def working_fp8_inputs(config: Config, layout: Layout, state: TrainState) -> tuple[Fp8Inputs, Params]:
    """Returns the inputs of FP8 products with delayed scaling, and the largest elements of the kernels.

    The kernels are quantized and, below ZeRO stage 3, gathered once per step, as in `working_params`. Without delayed
    scaling, all trees are empty.
    """
    if state.fp8_history is None:
        return NO_FP8_INPUTS, {}
    projections = abstract_fp8_model(config, layout)[1]
    with jax.named_scope('cast'):
        inputs, maxima = fp8_inputs(state.params, projections, state.fp8_history)
    stages = (layout.of_state,) if layout.zero == 3 else (layout.of_state, layout)
    for stage in stages:
        placed = kernel_shardings(param_shardings(config, stage), projections)
        inputs = inputs._replace(kernels=jax.lax.with_sharding_constraint(inputs.kernels, placed))
    return inputs, maxima


def mean_and_clip(
    grads: Params, count: jax.Array, factor: jax.Array | None, max_grad_norm: float
) -> tuple[Params, jax.Array]:
    """Divides summed gradients by `count` and by the loss factor, and clips them by their global norm.

    Args:
        grads: gradients, summed over the tokens of a batch.
        count: total weight of the tokens, float32 scalar.
        factor: factor by which the loss was multiplied; None means 1.
        max_grad_norm: largest global norm; 0 disables clipping.

    Returns:
        The gradients and their global norm before clipping.
    """
    with jax.named_scope('optimizer'):
        scale = 1 / (count if factor is None else count * factor)
        grad_norm = scale * optax.tree.norm(grads)
        if max_grad_norm:
            scale *= jnp.minimum(1, max_grad_norm / jnp.maximum(grad_norm, 1e-12))
        return jax.tree.map(lambda g: g * scale, grads), grad_norm


def make_update(config: Config, layout: Layout, optimizer: optax.GradientTransformation | None = None) -> Update:
    """Returns the optimizer update of a resolved config. It changes nothing if `ok` is False.

    With `mesh.host_offload`, its metrics are only the learning rate. They lack the learning rate if `optimizer` is
    used in place of the config's.
    """
    is_own = optimizer is not None or config.optimizer.is_function

    def update(state: TrainState, grads: Params, ok: jax.Array) -> tuple[Params, Any, Params | None, Metrics]:
        num_updates = state.step - state.skipped
        schedule = make_schedule(config.optimizer, config.train.num_steps, state.progress)
        fractions = make_run_fractions(config.optimizer, config.train.num_steps, state.progress)
        if state.progress is not None:
            # The optimizer counts updates, without the skipped steps.
            schedule, *rest = (partial(_at_step, each, state.step) for each in (schedule, *fractions))
            fractions = RunFractions(*rest)
        transform = optimizer or optimizer_of(config, layout, schedule, fractions)
        metrics: Metrics = {} if optimizer else {'learning_rate': jnp.asarray(schedule(num_updates))}

        def apply(grads: Params, params: Params, opt_state: Any, ema: Params | None) -> tuple[Any, ...]:
            old = params, opt_state, ema
            updates, opt_state = transform.update(grads, opt_state, params)
            if is_own:
                metrics['update_norm'] = jnp.where(ok, optax.tree.norm(updates), 0)
            elif config.mesh.host_offload == 'none':
                metrics.update(update_metrics(grads, updates, opt_state, ok, config))
            params = optax.apply_updates(params, updates)
            ema = update_ema(ema, params, decay=config.optimizer.ema_decay, num_updates=num_updates + 1)
            # A selection instead of a product with 0, because NaN times 0 is NaN.
            new = params, opt_state, ema
            selected: tuple[Any, ...] = jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, old)
            return selected

        if config.mesh.host_offload != 'none':
            apply = layer_by_layer(apply)
        ema = None if state.ema is None else trainable(config, state.ema)
        params, opt_state, ema = apply(grads, trainable(config, state.params), state.opt_state, ema)
        if state.ema is not None:
            ema = merge_trainable(state.ema, ema)
        return merge_trainable(state.params, params), opt_state, ema, metrics

    return jax.named_scope('optimizer')(update)


def _at_step(schedule: optax.Schedule, step: jax.Array, _: Any) -> jax.Array:
    """Returns the value of a schedule after `step` steps, for any number of updates."""
    return jnp.asarray(schedule(step))


def balance_loads(config: Config, params: Params, load_LE: jax.Array | None, ok: jax.Array) -> Params:
    """Returns the parameters after the biases of the routers changed toward a balanced load.

    The bias of an expert with more tokens than the mean decreases by `train.router_bias_rate`, and that of an expert
    with fewer tokens increases by it (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts"). Nothing changes if `ok` is False, and if only adapters are trained.
    """
    if not config.model.router_balance_bias or load_LE is None or config.model.lora_rank:
        return params
    blocks = params[BLOCKS]
    feedforward = blocks['feedforward']
    router = feedforward[ROUTER]
    direction_LE = jnp.sign(load_LE.mean(axis=1, keepdims=True) - load_LE)
    bias_LE = router[BALANCE_BIAS] + jnp.where(ok, config.train.router_bias_rate * direction_LE, 0)
    feedforward = {**feedforward, ROUTER: {**router, BALANCE_BIAS: bias_LE}}
    return {**params, BLOCKS: {**blocks, 'feedforward': feedforward}}


def update_ema(ema: Params | None, params: Params, *, decay: float, num_updates: jax.Array) -> Params | None:
    """Returns the exponential moving average after update number `num_updates`, counted from 1.

    The decay grows from 2/11 to `decay`, as in TensorFlow's `ExponentialMovingAverage(num_updates=…)`. With a constant
    decay the initial parameters would remain in the average for about 1 / (1 - decay) updates.

    Examples:
        >>> ema = update_ema({'kernel': jnp.zeros(2)}, {'kernel': jnp.ones(2)}, decay=0.999, num_updates=jnp.int32(1))
        >>> ema['kernel'].round(3)
        Array([0.818, 0.818], dtype=float32)
    """
    if ema is None:
        return None
    decay_now = jnp.minimum(decay, (1 + num_updates) / (10 + num_updates))
    return jax.tree.map(lambda average, param: decay_now * average + (1 - decay_now) * param, ema, params)
