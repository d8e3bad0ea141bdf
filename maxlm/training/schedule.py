"""The learning rate of every update."""

from __future__ import annotations

import optax

from maxlm.config.keys import OptimizerConfig


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of update n = 0, 1, …: linear warm-up from 0, then `config.schedule` until `num_steps`.

    Update `warmup_steps` has the peak rate, `num_steps` would have the minimum. In between falls a cosine (Loshchilov &
    Hutter 2017), a line, or with wsd first nothing and then a line (Hu et al. 2024, "MiniCPM"; Hägele et al. 2024,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations"). A decay that would begin within the
    warm-up begins at its end and is steeper; a run that is shorter than its warm-up stays in it.
    """
    peak, minimum, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    length = num_steps - warmup
    if config.schedule == 'constant' or length <= 0:
        after = optax.constant_schedule(peak)
    elif config.schedule == 'cosine':
        after = optax.cosine_decay_schedule(peak, length, alpha=minimum / peak)
    else:
        share = {'linear': 1.0, 'wsd': config.decay_fraction}[config.schedule]
        decay = min(max(1, round(share * num_steps)), length)
        after = optax.linear_schedule(peak, minimum, decay, transition_begin=length - decay)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
