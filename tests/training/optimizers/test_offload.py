"""State in host memory: memory kinds before and after a step, and the update one layer at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.parallel.host_offload import HOST, fetch, like, on_host, to_device
from maxlm.training.compile import compile_train_step
from maxlm.training.optimizers.offload import global_norm, layer_by_layer
from maxlm.training.state import TrainState, abstract_state
from maxlm.training.step import make_eval_step
from tests.small import small_batch, small_config, small_layout, small_state

# Parts of the state in host memory.
ON_HOST = {'none': (), 'optimizer': ('mu', 'nu'), 'all': ('params', 'ema', 'mu', 'nu')}


def config_with(offload):
    settings = {'model__family': 'llama', 'optimizer__ema_decay': 0.9, 'optimizer__warmup_steps': 0}
    return small_config(num_devices=8, mesh__host_offload=offload, **settings)


def memory_kinds(state):
    """Returns the memory kinds of the arrays in each part of a state."""
    moments = {name: optax.tree.get(state.opt_state, name) for name in ('mu', 'nu')}
    counters = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == ()]
    parts = {**state._asdict(), **moments, 'opt_state': counters}
    return {
        name: {leaf.sharding.memory_kind for leaf in jax.tree.leaves(part)}
        for name, part in parts.items()
        if part is not None
    }


def expected_kinds(offload):
    names = {*TrainState._fields, 'mu', 'nu'} - {'loss_scale', 'reference', 'progress', 'fp8_history'}
    return {name: {HOST if name in ON_HOST[offload] else 'device'} for name in names}


@pytest.fixture(scope='module', params=['optimizer', 'all'])
def trained(request):
    """Returns a config, its layout, and the state before and after a step."""
    config = config_with(request.param)
    layout = small_layout(config)
    abstract = abstract_state(config, layout)
    # The step donates its input, so a second state is needed.
    before, state = (small_state(config, layout) for _ in range(2))
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    after, metrics = compile_train_step(config, layout, abstract).step(state, batch)
    assert np.isfinite(metrics['loss'])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    return config, layout, before, after


def test_every_array_is_in_the_configured_memory(trained):
    config, layout, before, after = trained
    kinds = expected_kinds(config.mesh.host_offload)
    for state in (abstract_state(config, layout), before, after):
        assert memory_kinds(state) == kinds
    shardings = [jax.tree.map(lambda leaf: leaf.sharding, state) for state in (before, after)]
    assert shardings[0] == shardings[1]
    # Negative control: without offloading, all arrays are on the device.
    without = config_with('none')
    assert memory_kinds(abstract_state(without, layout)) == expected_kinds('none') != kinds
    # Arrays in host memory are sharded as on the device.
    kernel = after.params['blocks']['attention']['query']['kernel']
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    assert {shard.data.sharding.memory_kind for shard in kernel.addressable_shards} == kinds['params']


def test_a_step_updates_every_part(trained):
    _, _, before, after = trained
    assert int(after.step) == 1
    counts = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.shape == ()]
    assert counts
    # The count increases once per step, not once per layer.
    assert {int(count) for count in counts} == {1}
    for name in ('params', 'ema'):
        for path, old in jax.tree_util.tree_leaves_with_path(getattr(before, name)):
            new = dict(jax.tree_util.tree_leaves_with_path(getattr(after, name)))[path]
            changed = np.asarray(old) != np.asarray(new)
            layers = changed if path[0].key == 'blocks' else [changed]
            assert all(layer.any() for layer in layers), path


@pytest.mark.parametrize('trained', ['all'], indirect=True)
def test_parameters_on_the_host_are_evaluated(trained):
    config, layout, before, _ = trained
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    sums = jax.jit(make_eval_step(config, layout))(before.params, None, batch)
    assert abs(float(sums.loss / sums.tokens) - np.log(61)) < 0.2


def example(kind):
    """Returns parameters and optimizer state in one memory kind, with three layers and arrays outside of them."""
    rng = np.random.default_rng(0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)

    def params():
        return {
            'blocks': {'kernel': jax.device_put(rng.normal(size=(3, 4, 5)).astype(np.float32), sharding)},
            'embedding': jax.device_put(rng.normal(size=(6, 4)).astype(np.float32), sharding),
        }

    return params(), (jnp.int32(7), params())


@pytest.mark.parametrize('kind', [HOST, 'device'])
def test_layer_by_layer_is_the_same_update(kind):
    params, opt_state = example(kind)
    grads = example('device')[0]
    shapes = []

    def update(grads, params, opt_state):
        count, mean = opt_state
        shapes.append([leaf.shape for leaf in jax.tree.leaves(params)])
        assert not any(map(on_host, jax.tree.leaves((params, opt_state))))
        mean = jax.tree.map(lambda m, g: 0.5 * m + g, mean, grads)
        return jax.tree.map(lambda p, m: p - m * count, params, mean), (count + 1, mean)

    results = jax.jit(layer_by_layer(update))(grads, params, opt_state)
    assert shapes == [[(6, 4)], [(4, 5)]]
    on_device = update(grads, *to_device((params, opt_state)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), results, on_device)
    assert int(results[1][0]) == 8
    # Negative control: the result differs from the input.
    assert not np.allclose(results[0]['blocks']['kernel'], params['blocks']['kernel'])
    where = jax.tree.map(on_host, results)
    expected = {'blocks': {'kernel': kind == HOST}, 'embedding': kind == HOST}
    assert where == (expected, (False, expected))


@pytest.mark.parametrize('kind', [HOST, 'device'])
def test_norm_of_arrays_on_the_host(kind):
    params, _ = example(kind)
    by_definition = np.sqrt(sum(np.square(np.asarray(leaf)).sum() for leaf in jax.tree.leaves(params)))
    np.testing.assert_allclose(jax.jit(global_norm)(params), by_definition, rtol=1e-6)
    assert jax.jit(global_norm)({}) == 0


def test_the_gradient_of_a_fetched_array_is_that_of_its_slot():
    params, _ = example(HOST)
    slots = jax.tree.map(jnp.zeros_like, example('device')[0])

    def loss(slots, params):
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(fetch(params, slots)))

    value, gradients = jax.jit(jax.value_and_grad(loss))(slots, params)
    np.testing.assert_allclose(value, np.square(float(global_norm(to_device(params)))), rtol=1e-6)
    # Gradients are those of the fetched values, not of the slots, and are on the device.
    jax.tree.map(lambda g, p: np.testing.assert_allclose(g, 2 * np.asarray(p), rtol=1e-6), gradients, params)
    assert not any(map(on_host, jax.tree.leaves(gradients)))
    # Negative control: without slots, only the value is returned.
    assert not any(map(on_host, jax.tree.leaves(jax.jit(lambda params: fetch(params, None))(params))))


def test_replacements_of_host_arrays_are_on_the_host():
    on_hosts, _ = example(HOST)
    on_device, _ = example('device')
    mixed = {**on_device, 'embedding': on_hosts['embedding']}
    where = jax.tree.map(on_host, jax.jit(lambda new: like(mixed, new))(on_device))
    assert where == {'blocks': {'kernel': False}, 'embedding': True}
    assert not any(map(on_host, jax.tree.leaves(to_device(mixed))))
