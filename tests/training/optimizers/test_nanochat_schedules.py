"""Schedules of rate, momentum and weight decay against the formulas of nanochat's scripts/base_train.py (July 2026)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.errors import InputError
from maxlm.training.decisions.run_control import RunControl
from maxlm.training.decisions.run_length import progress_of
from maxlm.training.optimizers.muon import momentum_schedule
from maxlm.training.optimizers.schedule import make_run_fractions, make_schedule
from tests.small import small_config

SETTINGS = {
    'learning_rate': 1.0,
    'schedule': 'wsd',
    'wsd_decay_fraction': 0.65,
    'min_learning_rate': 0.05,
    'warmup_steps': 40,
    'warmup_from_zero': False,
}


def rate_of(step, num_steps):
    decay = round(0.65 * num_steps)
    if step < 40:
        return (step + 1) / 40
    left = (num_steps - step) / decay
    return 1.0 if left >= 1 else left + (1 - left) * 0.05


def momentum_of(step, num_steps):
    decay = round(0.65 * num_steps)
    if step < 400:
        return 0.85 + 0.12 * step / 400
    return 0.97 - 0.07 * max(0, step - (num_steps - decay)) / decay


def schedules(num_steps, progress=None, **settings):
    """Returns rate, momentum and completed fraction of a run by step."""
    config = OptimizerConfig(**{**SETTINGS, **settings})
    fractions = make_run_fractions(config, num_steps, progress)
    momentum = momentum_schedule(0.97, warmup_steps=400, final=0.9, decayed=fractions.decay)
    return make_schedule(config, num_steps, progress), momentum, fractions.run


@pytest.mark.parametrize('num_steps', [300, 2000])
def test_rates_and_momentums_equal_nanochat(num_steps):
    """In a run of 300 steps, the warm-up of the momentum has not ended."""
    steps = jnp.arange(num_steps)
    rate, momentum, run = (np.asarray(jax.jit(jax.vmap(each))(steps)) for each in schedules(num_steps))
    np.testing.assert_allclose(rate, [rate_of(step, num_steps) for step in range(num_steps)], rtol=2e-5)
    np.testing.assert_allclose(momentum, [momentum_of(step, num_steps) for step in range(num_steps)], rtol=1e-6)
    np.testing.assert_allclose(run, np.arange(num_steps) / num_steps, atol=1e-6)
    # Negative controls: the warm-up from 0, and a momentum that stays.
    other = make_schedule(OptimizerConfig(**{**SETTINGS, 'warmup_from_zero': True}), num_steps)
    assert float(other(0)) == 0
    assert float(other(39)) == pytest.approx(39 / 40)
    assert (momentum[-1] < 0.901) == (num_steps == 2000)


@pytest.mark.parametrize('schedule', ['wsd', 'linear', 'cosine'])
def test_a_budget_gives_the_values_of_a_fixed_length(schedule):
    config = small_config(
        train__num_steps=0,
        train__hours=1.0,
        **{f'optimizer__{key}': value for key, value in {**SETTINGS, 'schedule': schedule}.items()},
    )
    progress = jax.tree.map(jnp.float32, progress_of(RunControl(num_steps=1000), config))
    steps = jnp.arange(1000)
    of_budget = schedules(UNDECIDED_STEPS, progress, schedule=schedule)
    for found, fixed in zip(of_budget, schedules(1000, schedule=schedule), strict=True):
        np.testing.assert_allclose(jax.vmap(found)(steps), jax.vmap(fixed)(steps), rtol=2e-4, atol=1e-6)


def test_a_final_momentum_requires_a_decay():
    muon = {'optimizer__name': 'muon', 'optimizer__muon_final_momentum': 0.9}
    assert small_config(**muon).optimizer.muon_final_momentum == 0.9
    for schedule in ('constant', 'my_module:mine'):
        with pytest.raises(InputError, match=f'optimizer.schedule={schedule}: this schedule has no decay'):
            small_config(**muon, optimizer__schedule=schedule)


def test_decay_of_cosine_begins_after_the_warmup():
    fractions = make_run_fractions(OptimizerConfig(schedule='cosine', warmup_steps=10), 30)
    assert [float(fractions.decay(step)) for step in (0, 10, 20, 30, 40)] == [0, 0, 0.5, 1, 1]
    assert math.isclose(float(fractions.run(10)), 1 / 3, rel_tol=1e-6)
