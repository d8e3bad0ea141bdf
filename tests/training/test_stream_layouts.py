"""Equality of the options of the residual stream and value embeddings on two devices, by mesh axis, with one device."""

import functools

import jax
import numpy as np
import optax
import pytest

from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state
from tests.parameters import first_state
from tests.small import EXPERTS, STREAM, small_batch, small_config, small_layout

# Four layers, of which the first of the model with experts is dense.
COMMON = {**STREAM, 'model__num_layers': 4, 'model__vocab_size': 64, 'train__global_batch_size': 8}
DENSE = {'model__family': 'nanochat'}
# The load-balancing loss depends on the division into micro-batches.
SPARSE = {**EXPERTS, 'model__num_layers': 5, 'model__backout_layer': 0, 'train__load_balancing_loss': 0.0}
# The first, the third and the last layer have value embeddings; the first is dense.
VALUES = {**SPARSE, 'model__value_embedding_pattern': 'NV', 'model__value_gate_channels': 5}
LAYOUTS = {
    'fsdp': ({'mesh__fsdp': 2}, DENSE),
    'parameters on the host': ({'mesh__fsdp': 2, 'mesh__host_offload': 'all'}, DENSE),
    # The moments of AdamW include these parameters.
    'muon': ({'mesh__fsdp': 2}, {**DENSE, 'optimizer__name': 'muon'}),
    'tensor': ({'mesh__tensor': 2, 'mesh__fsdp': 1}, DENSE),
    'context': (
        {'mesh__context': 2, 'mesh__fsdp': 1},
        {
            'model__family': 'gpt2',
            'model__value_embedding_pattern': 'NV',
            'model__value_gate_channels': 5,
            'model__relative_attention_multiplier': 1.3,
        },
    ),
    'stage': ({'mesh__stage': 2, 'mesh__fsdp': 1, 'train__per_device_batch_size': 2}, DENSE),
    'stage, repeated, experts': (
        {'mesh__stage': 2, 'mesh__num_pipeline_repeats': 2, 'mesh__fsdp': 1, 'train__per_device_batch_size': 2},
        SPARSE,
    ),
    'stage, value embeddings': ({'mesh__stage': 2, 'mesh__fsdp': 1, 'train__per_device_batch_size': 2}, VALUES),
    'stage, repeated, value embeddings': (
        {'mesh__stage': 2, 'mesh__num_pipeline_repeats': 2, 'mesh__fsdp': 1, 'train__per_device_batch_size': 2},
        {**VALUES, 'model__value_embedding_pattern': 'V', 'optimizer__name': 'muon'},
    ),
    'expert': ({'mesh__expert': 2, 'mesh__fsdp': 1}, SPARSE),
}


def moments_and_loss(config):
    """Returns the first moments and the loss of one step."""
    layout = small_layout(config)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    state, metrics = step(first_state(config, layout), batch)
    return jax.device_get(optax.tree.get(state.opt_state, 'mu')), float(metrics['loss'])


@functools.cache
def on_one_device(settings):
    return moments_and_loss(small_config(**{**COMMON, **dict(settings)}))


@pytest.mark.parametrize('name', LAYOUTS)
def test_two_devices_equal_one(name):
    mesh, model = LAYOUTS[name]
    expected, loss = on_one_device(tuple(model.items()))
    found, other_loss = moments_and_loss(small_config(num_devices=2, **{**COMMON, **model, **mesh}))
    np.testing.assert_allclose(other_loss, loss, rtol=2e-6)
    for moment, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, moment, rtol=0, atol=1e-5 * max(np.abs(moment).max(), 1e-3))
    for key in ('residual_scales', 'embedding_scales', 'smear_gate', 'smear_scale', 'backout_scale'):
        assert np.all(expected[key] != 0)
    for layer in expected.get('value_embeddings', ()):
        assert np.any(layer != 0)
