"""Equality of hidden states and gradients of models with adapters on all layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.attention.ring import zigzag
from maxlm.model.decoder import Decoder
from maxlm.training.state import abstract_model, param_shardings
from tests.adapters import adapter_arrays, with_arrays
from tests.small import small_batch, small_config, small_layout

# The rank does not divide over the devices.
COMMON = {
    'model__family': 'llama',
    'model__num_kv_heads': 2,
    'model__vocab_size': 64,
    'model__lora_rank': 3,
}
LAYOUTS = [
    {'mesh__fsdp': 2, 'mesh__tensor': 2},
    {'mesh__stage': 2, 'mesh__fsdp': 2, 'train__per_device_batch_size': 1, 'model__remat_policy': 'full'},
    pytest.param(
        {'mesh__context': 2, 'mesh__fsdp': 2, 'mesh__zero_stage': 2, 'model__scan_layers': False},
        marks=pytest.mark.nightly,
    ),
]


@functools.cache
def initial_params():
    model = small_config(**COMMON).model
    return jax.device_get(jax.jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(model, rngs=nnx.Rngs(0)))))())


def results(**settings):
    """Returns the hidden states [B, T, D] of a batch and the gathered gradients of a weighted sum of them."""
    config = small_config(num_devices=4 if 'mesh__fsdp' in settings else 1, **COMMON, **settings)
    layout = small_layout(config)
    graph, _ = nnx.split(abstract_model(config, layout))
    params = with_arrays(initial_params(), adapter_arrays(config.model))
    params = jax.device_put(params, param_shardings(config, layout))
    T = config.data.seq_len
    order = zigzag(T, layout.num_shards('length')) if layout.num_shards('length') > 1 else np.arange(T)
    batch = {name: rows[:, order] for name, rows in small_batch(config).items()}
    batch = layout.put_batch(batch, config.train.global_batch_size)
    weights = np.random.default_rng(0).normal(size=(config.train.global_batch_size, T, config.model.dim))

    def loss(params):
        x_BTD, _, _ = nnx.merge(graph, params)(
            batch['tokens'],
            segments_BT=batch['segments'],
            positions_BT=batch['positions'],
            micro_batches=config.accumulation // config.rounds,
        )
        return (jnp.sin(x_BTD) * jnp.float32(weights[:, order])).sum(), x_BTD

    run = jax.jit(jax.grad(loss, has_aux=True))
    gradients, x_BTD = jax.device_get(run(params))
    return x_BTD[:, np.argsort(order)], gradients


@functools.cache
def on_one_device():
    return results()


@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_every_layout_equals_one_device(layout):
    expected, expected_gradients = on_one_device()
    found, gradients = results(**layout)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for (path, gradient), other in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        np.testing.assert_allclose(gradient, other, rtol=0, atol=1e-4 * np.abs(other).max(), err_msg=str(path))
        # Negative control: gradients are not zero, except for the head, on which hidden states do not depend.
        assert np.abs(gradient).max() > 1e-2 or path[0].key == 'head', path


def test_shardings_of_adapters():
    config = small_config(num_devices=4, **COMMON, **LAYOUTS[0])
    blocks = param_shardings(config, small_layout(config))['blocks']
    assert tuple(blocks['attention']['query']['lora_a'].spec) == ('stage', ('fsdp', 'expert', 'context'), None)
    assert tuple(blocks['attention']['query']['lora_b'].spec) == ('stage', None, 'tensor', None)
    assert tuple(blocks['attention']['out']['lora_a'].spec) == ('stage', 'tensor', None, None)
    assert tuple(blocks['feedforward']['down']['lora_b'].spec) == ('stage', None, ('fsdp', 'expert', 'context'))
