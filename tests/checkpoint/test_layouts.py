"""Checkpoints restored into another layout: equal state with new partitioning, from which training continues."""

import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from maxlm.checkpoint.manager import Checkpoints
from maxlm.training.compile import compile_train_step
from maxlm.training.loss_scale import first_loss_scale
from maxlm.training.state import abstract_state, init_state
from tests.small import small_batch, small_config, small_layout

COMMON = {
    'model__family': 'llama',
    'model__num_layers': 4,
    # `mesh.tensor` pads this vocabulary.
    'model__vocab_size': 61,
    'train__global_batch_size': 16,
    'data__seq_len': 8,
    'model__dim': 16,
    'optimizer__warmup_steps': 0,
    'optimizer__ema_decay': 0.9,
}
LAYOUTS = {
    'zero 1': {'mesh__zero_stage': 1},
    'context': {'mesh__context': 2, 'mesh__tensor': 2},
    'stages': {'mesh__stage': 2, 'mesh__num_pipeline_repeats': 2, 'train__per_device_batch_size': 2},
    'offload': {'mesh__host_offload': 'all'},
    'float16': {'model__dtype': 'float16', 'train__initial_loss_scale': 1024.0, 'train__loss_scale_growth_interval': 2},
}
# Number of training steps on each layout, all of which are saved.
STEPS = 2
# Each layout is saved once and restored once. The layout with a loss scale also restores its own scale.
RING = {*itertools.pairwise([*LAYOUTS, next(iter(LAYOUTS))]), ('float16', 'float16')}
PAIRS = [
    pytest.param(*pair, marks=() if pair in RING else pytest.mark.nightly)
    for pair in itertools.product(LAYOUTS, LAYOUTS)
]


class Trained(NamedTuple):
    """A layout, a run on it and the loss of the following step.

    Attributes:
        states: host copy of the state after each step.
        next_loss: loss of the step after them.
    """

    config: object
    layout: object
    abstract: object
    step: object
    states: list
    next_loss: float

    @property
    def batch(self):
        return self.layout.put_batch(small_batch(self.config), self.config.train.global_batch_size)

    def loss_after(self, state):
        """Returns the loss of the next step and donates the state."""
        _, metrics = self.step(state, self.batch)
        return float(metrics['loss'])


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Returns a function that maps a layout to a run and the workdir with its checkpoints."""
    config = small_config(num_devices=8, **COMMON)
    # Initialized once, because compiling it for each layout would double the duration of this module.
    initial = jax.device_get(init_state(config, small_layout(config)))
    runs = {}
    for name, settings in LAYOUTS.items():
        workdir = tmp_path_factory.mktemp(name.replace(' ', '_'))
        config = small_config(num_devices=8, **{**COMMON, **settings})
        layout = small_layout(config)
        abstract = abstract_state(config, layout)
        run = Trained(config, layout, abstract, compile_train_step(config, layout, abstract).step, [], np.nan)
        scale = first_loss_scale(config.train) if config.model.dtype == 'float16' else None
        state = jax.tree.map(
            lambda leaf, abstract: jax.device_put(leaf, abstract.sharding), initial._replace(loss_scale=scale), abstract
        )
        with Checkpoints(workdir, max_to_keep=STEPS) as checkpoints:
            for step in range(1, STEPS + 1):
                state, _ = run.step(state, run.batch)
                checkpoints.save(step, state, {'layout': name})
                run.states.append(jax.device_get(state))
        runs[name] = run._replace(next_loss=run.loss_after(state)), workdir
    return runs


def restore(workdir, abstract, step=STEPS):
    with Checkpoints(workdir, max_to_keep=STEPS) as checkpoints:
        return checkpoints.restore(step, abstract, loss_scale=512.0)


def same(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize(('saved', 'wanted'), PAIRS)
def test_training_continues_in_another_layout(runs, saved, wanted):
    (run, workdir), (other, _) = runs[saved], runs[wanted]
    state, facts, *_ = restore(workdir, other.abstract)
    assert facts == {'layout': saved}
    # The state is bit-identical, and in the memory kind of the layout.
    assert same(state._replace(loss_scale=None), run.states[-1]._replace(loss_scale=None))
    placed = jax.tree.map(lambda leaf, abstract: leaf.sharding == abstract.sharding, state, other.abstract)
    assert all(jax.tree.leaves(placed))
    if wanted == 'float16':
        # Without a stored loss scale, the run starts with the configured one.
        assert [float(x) for x in state.loss_scale] == ([2048, 0] if saved == 'float16' else [512, 0])
    rtol = 1e-6 if (saved == 'float16') == (wanted == 'float16') else 2e-3
    assert other.loss_after(state) == pytest.approx(run.next_loss, rel=rtol)


@pytest.mark.parametrize(('saved', 'wanted'), [('stages', 'offload'), ('offload', 'context')])
def test_other_step_restores_another_state(runs, saved, wanted):
    (run, workdir), (other, _) = runs[saved], runs[wanted]
    state, *_ = restore(workdir, other.abstract, step=1)
    assert same(state, run.states[0])
    for part in ('params', 'ema', 'opt_state'):
        assert not same(getattr(state, part), getattr(run.states[-1], part))
    assert other.loss_after(state) != pytest.approx(run.next_loss, rel=2e-3)
