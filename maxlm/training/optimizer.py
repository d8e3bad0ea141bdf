"""AdamW and its learning-rate schedule, from optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

from maxlm.config.keys import OptimizerConfig

# Scales and biases, by the names that the model's modules give them. Pulling them to zero does not regularize.
UNDECAYED = ('scale', 'bias')


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of update n = 0, 1, …: linear warm-up from 0, then `config.schedule` until `num_steps`.

    Update `warmup_steps` has the peak rate; the cosine (Loshchilov & Hutter 2017) reaches the minimum at `num_steps`.
    A run that is shorter than its warm-up stays in it.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == 'constant' or num_steps <= warmup:
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, num_steps - warmup, alpha=config.min_learning_rate / peak)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer of `config.name`; decay falls on matrices and embeddings only, and clipping is the step's.

    adamw: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization".
    """
    make = {'adamw': optax.adamw}[config.name]
    return make(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def decay_mask(params: Any) -> Any:
    """True for the parameters that weight decay applies to."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in UNDECAYED, params)
