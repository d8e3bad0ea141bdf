"""The step compiled from shapes alone: its memory, and that it runs on real arrays."""

import math

import jax
import numpy as np
import pytest

from maxlm.planning.compile import BATCH_TYPES, compile_train_step
from maxlm.training.state import abstract_state, init_state
from tests.small import small_batch, small_config, small_layout


def bytes_on_a_device(leaf):
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


@pytest.fixture(scope='module')
def compiled_on_eight():
    # A moving average that begins as the parameters: a donated state must not hold one array twice.
    config = small_config(num_devices=8, model__num_layers=1, optimizer__ema_decay=0.9)
    layout = small_layout(config)
    abstract = abstract_state(config, layout)
    return config, layout, abstract, compile_train_step(config, layout, abstract)


def test_memory_of_state_and_batch(compiled_on_eight):
    config, _, abstract, compiled = compiled_on_eight
    memory = compiled.memory_bytes()
    state = sum(map(bytes_on_a_device, jax.tree.leaves(abstract)))
    batch = len(BATCH_TYPES) * 4 * config.train.global_batch * config.data.window // 8
    assert memory['state'] == pytest.approx(state + batch, rel=0.02)
    assert memory['temporary'] > 0
    # Control: it tells the state from that of a single device, and from one without the moments.
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    params = sum(map(bytes_on_a_device, jax.tree.leaves(abstract.params)))
    assert memory['state'] < 0.5 * whole
    assert memory['state'] > 2 * params


def test_it_runs_on_real_arrays(compiled_on_eight):
    config, layout, abstract, compiled = compiled_on_eight
    assert compiled.seconds > 0
    host_batch = small_batch(config)
    batch = layout.put_batch(host_batch, config.train.global_batch)
    assert {name: x.dtype for name, x in batch.items()} == BATCH_TYPES
    given = init_state(config, layout)
    state, metrics = compiled.step(given, batch)
    assert float(metrics['tokens']) == host_batch['weights'].sum()
    assert abs(float(metrics['loss']) - math.log(61)) < 0.2
    # What comes out can go in again; what went in was donated.
    assert jax.tree.all(jax.tree.map(lambda leaf, shape: leaf.sharding == shape.sharding, state, abstract))
    assert given.params['embedding'].is_deleted()
    assert given.ema['embedding'].is_deleted()
    before = np.asarray(state.params['embedding'])
    # The first step of a warm-up has rate 0.
    state, _ = compiled.step(state, batch)
    assert int(state.step) == 2
    assert not np.array_equal(state.params['embedding'], before)
