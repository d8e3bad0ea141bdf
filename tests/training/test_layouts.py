"""Equality of loss, gradients and training steps on all layouts with those on one device.

Six layouts cover every mesh axis and every memory optimization; nightly tests add others. Each layout is compiled
for eight devices, which is slow.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from maxlm.model.attention.ring import zigzag
from maxlm.parallel.layout import TABLE
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from tests.small import LATENT, small_batch, small_config, small_layout, small_state

STEPS = 5
# Four layers, four heads, a vocabulary that divides over devices, and 16 rows of two or three documents.
COMMON = {
    'model__vocab_size': 64,
    'model__num_layers': 4,
    'train__global_batch_size': 16,
    'train__z_loss': 0.01,
    'optimizer__warmup_steps': 0,
}
LLAMA = {'model__family': 'llama', 'model__num_kv_heads': 2}
# A vocabulary that does not divide over devices.
PADDED = {'model__vocab_size': 61}
LAYOUTS = [
    {'mesh__fsdp': 4, 'mesh__data': 2, 'mesh__zero_stage': 2, 'train__per_device_batch_size': 1, **LLAMA},
    # Gradients are reduced once per step.
    {
        'mesh__replica': 2,
        'mesh__data': 2,
        'mesh__fsdp': 2,
        'mesh__zero_stage': 1,
        'train__per_device_batch_size': 1,
        **LLAMA,
        **PADDED,
    },
    {
        'mesh__replica': 2,
        'mesh__fsdp': 2,
        'mesh__tensor': 2,
        'train__per_device_batch_size': 1,
        'model__remat_policy': 'full',
        **LLAMA,
        **PADDED,
    },
    {'mesh__context': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, 'model__remat_policy': 'dots', **LLAMA},
    {
        'mesh__stage': 2,
        'mesh__num_pipeline_repeats': 2,
        'mesh__data': 2,
        'mesh__tensor': 2,
        'train__per_device_batch_size': 1,
        'model__attention_scale_by_layer': True,
        **LLAMA,
    },
    {'mesh__fsdp': 4, 'mesh__data': 2, 'mesh__host_offload': 'all', 'train__per_device_batch_size': 1, **LLAMA},
]
NIGHTLY_LAYOUTS = [
    {'mesh__fsdp': 2, 'mesh__tensor': 4, 'model__attention_sinks': True, 'model__activation': 'swiglu_oai'},
    {'mesh__context': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, **LATENT, 'model__q_lora_rank': 20},
    {'mesh__stage': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, 'train__per_device_batch_size': 2, **LATENT},
    {'mesh__fsdp': 4, 'mesh__tensor': 2, 'optimizer__name': 'muon', **LATENT, 'model__q_lora_rank': 20},
    {'mesh__fsdp': 4, 'mesh__tensor': 2, 'optimizer__name': 'muon', 'model__family': 'nanochat', **PADDED},
    {'mesh__data': 8, 'mesh__fsdp': 1},
    {'mesh__fsdp': 8},
    # The whole micro-batch on each device, so gradients are not accumulated.
    {'mesh__fsdp': 8, 'mesh__zero_stage': 1, 'train__per_device_batch_size': 2},
    {'mesh__tensor': 4, 'mesh__fsdp': 2, 'model__scan_layers': False, 'model__attention_scale_by_layer': True},
    # Tied embeddings, of which ZeRO stage 2 only shards the gradients.
    {'mesh__tensor': 4, 'mesh__fsdp': 2, 'mesh__zero_stage': 2, **PADDED},
    {'mesh__replica': 2, 'mesh__data': 2, 'mesh__tensor': 2, 'mesh__fsdp': 1},
    {'mesh__fsdp': 4, 'mesh__data': 2, **LLAMA},
    {'mesh__context': 8},
    {
        'mesh__context': 4,
        'mesh__data': 2,
        'mesh__fsdp': 1,
        'train__per_device_batch_size': 2,
        'model__attention_pattern': 'SL',
        'model__sliding_window': 5,
    },
    {'mesh__stage': 2, 'mesh__fsdp': 4, 'train__per_device_batch_size': 1},
    {'mesh__stage': 4, 'mesh__data': 2, 'mesh__fsdp': 1, 'train__per_device_batch_size': 2},
    {
        'mesh__stage': 2,
        'mesh__context': 2,
        'mesh__fsdp': 2,
        'train__per_device_batch_size': 2,
        **LLAMA,
        'model__remat_policy': 'full',
    },
    {
        'mesh__stage': 2,
        'mesh__context': 2,
        'mesh__tensor': 2,
        'train__per_device_batch_size': 2,
        'mesh__fsdp': 1,
        **PADDED,
    },
    {'mesh__stage': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, 'mesh__zero_stage': 2, 'train__per_device_batch_size': 4},
    {
        'mesh__fsdp': 4,
        'mesh__tensor': 2,
        'model__family': 'gemma2',
        'model__sliding_window': 5,
        'model__rope_local_theta': 77.0,
    },
    {
        'mesh__stage': 2,
        'mesh__tensor': 2,
        'mesh__fsdp': 2,
        'train__per_device_batch_size': 2,
        'model__family': 'olmo3',
        'model__attention_pattern': 'SN',
        'model__sliding_window': 5,
        'model__norm_placement': 'pre',
    },
    {
        'mesh__context': 2,
        'mesh__tensor': 2,
        'mesh__fsdp': 2,
        'model__family': 'granite',
        'model__attention_pattern': 'NL',
        'model__logits_scaling': 0.5,
    },
    {'mesh__fsdp': 8, 'mesh__host_offload': 'optimizer', 'model__remat_policy': 'offload'},
    {
        'mesh__fsdp': 4,
        'mesh__tensor': 2,
        'model__family': 'nanochat',
        'model__value_embedding_pattern': 'NV',
        'model__value_gate_channels': 12,
        'optimizer__name': 'muon',
        **PADDED,
    },
]


def name_of(layout):
    return ','.join(f'{key.split("__")[1]}={value}' for key, value in layout.items())


@functools.cache
def on_one_device(settings):
    config = small_config(**{**COMMON, **dict(settings)})
    return train(config)


def train(config):
    """Returns the first moments after one step, and losses and norms of all steps."""
    layout = small_layout(config)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    state, history, moments = small_state(config, layout), [], {}
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        history.append([float(metrics[name]) for name in ('loss', 'grad_norm', 'param_norm')])
        # The moments are a tenth of the clipped gradient, or a twentieth for Muon.
        moments = moments or {
            name: jax.device_get(optax.tree.get(state.opt_state, name)) for name in ('mu', 'momentum')
        }
    return moments, np.array(history)


@pytest.mark.parametrize(
    'layout',
    [
        *(pytest.param(layout, id=name_of(layout)) for layout in LAYOUTS),
        *(pytest.param(layout, id=name_of(layout), marks=pytest.mark.nightly) for layout in NIGHTLY_LAYOUTS),
    ],
)
def test_every_layout_equals_one_device(layout):
    assert_equals_one_device(layout, 8)


VALUES = {
    **LLAMA,
    'model__value_embedding_pattern': 'NV',
    'model__value_gate_channels': 12,
    'model__relative_attention_multiplier': 1.44,
    'optimizer__name': 'muon',
}


@pytest.mark.parametrize(
    'layout',
    [
        {'mesh__fsdp': 2, 'model__remat_policy': 'full'},
        {'mesh__tensor': 2, **PADDED},
        pytest.param({'mesh__context': 2}, marks=pytest.mark.nightly),
        {'mesh__stage': 2, 'mesh__num_pipeline_repeats': 1, 'train__per_device_batch_size': 4},
        pytest.param(
            {'mesh__data': 2, 'mesh__zero_stage': 1, 'train__per_device_batch_size': 4}, marks=pytest.mark.nightly
        ),
        pytest.param({'mesh__fsdp': 2, 'mesh__zero_stage': 2, 'model__scan_layers': False}, marks=pytest.mark.nightly),
    ],
    ids=name_of,
)
def test_value_embeddings_on_two_devices_equal_one_device(layout):
    assert_equals_one_device({**VALUES, **layout}, 2)


def assert_equals_one_device(layout, num_devices):
    model = {
        key: value
        for key, value in layout.items()
        if key.startswith(('model', 'optimizer')) and key not in ('model__remat_policy', 'model__scan_layers')
    }
    moments, history = on_one_device(tuple(model.items()))
    config = small_config(num_devices=num_devices, **{**COMMON, **layout})
    other_moments, other_history = train(config)
    # Differences are relative to the largest element of each array, because single elements may be arbitrarily small.
    for moment, other in zip(jax.tree.leaves(moments), jax.tree.leaves(other_moments), strict=True):
        np.testing.assert_allclose(other, moment, rtol=0, atol=2e-6 * max(np.abs(moment).max(), 1e-3))
    np.testing.assert_allclose(other_history[0], history[0], rtol=2e-6)
    np.testing.assert_allclose(other_history, history, rtol=1e-4)
    # Negative control: training changes the loss far more than this tolerance.
    assert history[-1, 0] < 0.95 * history[0, 0]


def test_a_ring_in_sequence_order_gives_another_result(monkeypatch):
    monkeypatch.setattr('maxlm.training.gradients.zigzag', lambda length, devices: np.arange(length))
    _, history = on_one_device(tuple(LLAMA.items()))
    _, other_history = train(small_config(num_devices=2, **COMMON, **LLAMA, mesh__context=2))
    assert abs(other_history[0, 1] / history[0, 1] - 1) > 1e-3
    assert not np.array_equal(zigzag(16, 2), np.arange(16))


@pytest.mark.parametrize(
    ('axis', 'mesh_axes', 'mesh'),
    [
        ('ffn', ('fsdp',), {}),
        ('length', ('fsdp',), {}),
        ('heads', ('context',), {'mesh__context': 2}),
        ('vocab', ('fsdp',), {}),
    ],
)
def test_a_table_that_splits_two_axes_over_one_mesh_axis_is_refused(monkeypatch, axis, mesh_axes, mesh):
    config = small_config(num_devices=8, **COMMON, **mesh)
    monkeypatch.setitem(TABLE, axis, mesh_axes)
    layout = small_layout(config)
    with pytest.raises(AssertionError, match='two axes over one mesh axis'):
        jax.eval_shape(
            make_train_step(config, layout),
            abstract_state(config, layout),
            layout.put_batch(small_batch(config), config.train.global_batch_size),
        )
