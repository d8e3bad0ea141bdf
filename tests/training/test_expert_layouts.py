"""Equality of training steps with experts on all layouts with those on one device; see `test_layouts.py`.

Three layouts cover the exchange of tokens, pipelines and the capacity of experts; nightly tests add eleven.
"""

import functools

import jax
import numpy as np
import pytest

from tests.small import small_config
from tests.training.test_layouts import COMMON, train

MIXTRAL = {
    'model__family': 'llama',
    'model__num_kv_heads': 2,
    'model__num_experts': 4,
    'model__num_experts_per_token': 2,
    'model__expert_ffn_dim': 32,
    'train__router_z_loss': 0.01,
}
DEEPSEEK = {
    **MIXTRAL,
    'model__num_shared_experts': 1,
    'model__num_layers': 3,
    'model__num_dense_layers': 1,
    'model__router_score': 'sigmoid',
    'model__router_balance_bias': True,
    'model__num_expert_groups': 2,
    'model__expert_group_score': 'top2',
    'train__router_bias_rate': 0.01,
}
LAYOUTS = [
    {'mesh__expert': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, **DEEPSEEK},
    {
        'mesh__stage': 2,
        'mesh__expert': 2,
        'mesh__fsdp': 2,
        'train__per_device_batch_size': 2,
        **DEEPSEEK,
    },
    {'mesh__expert': 4, 'mesh__fsdp': 2, 'model__expert_capacity_factor': 1.0, **MIXTRAL},
]
NIGHTLY_LAYOUTS = [
    {'mesh__expert': 4, 'mesh__data': 2, 'mesh__fsdp': 1, **MIXTRAL},
    {'mesh__expert': 2, 'mesh__context': 2, 'mesh__fsdp': 2, 'model__remat_policy': 'full', **MIXTRAL},
    {'mesh__stage': 2, 'mesh__expert': 2, 'mesh__fsdp': 2, 'train__per_device_batch_size': 1, **MIXTRAL},
    {
        'mesh__stage': 2,
        'mesh__num_pipeline_repeats': 2,
        'mesh__expert': 2,
        'mesh__tensor': 2,
        'mesh__fsdp': 1,
        'train__per_device_batch_size': 1,
        **MIXTRAL,
    },
    {
        'mesh__replica': 2,
        'mesh__expert': 2,
        'mesh__fsdp': 2,
        'mesh__zero_stage': 1,
        'train__per_device_batch_size': 1,
        **MIXTRAL,
    },
    {'mesh__fsdp': 8, 'optimizer__name': 'muon', **MIXTRAL},
    {'mesh__expert': 2, 'mesh__fsdp': 4, 'optimizer__name': 'muon', **DEEPSEEK},
    {'mesh__expert': 2, 'mesh__fsdp': 4, 'mesh__host_offload': 'all', **MIXTRAL},
    {
        'mesh__expert': 4,
        'mesh__fsdp': 2,
        'mesh__zero_stage': 2,
        'model__expert_matmul': 'ragged_dot',
        'model__scan_layers': False,
        **MIXTRAL,
    },
    {'mesh__context': 8, 'mesh__fsdp': 1, **MIXTRAL},
    {
        'mesh__stage': 2,
        'mesh__tensor': 2,
        'mesh__fsdp': 2,
        'model__expert_capacity_factor': 0.75,
        'train__per_device_batch_size': 2,
        **MIXTRAL,
    },
]


def name_of(layout):
    """Returns the settings that differ from those of the model."""
    model = DEEPSEEK if 'model__num_shared_experts' in layout else MIXTRAL
    own = {key: value for key, value in layout.items() if key not in model}
    return ','.join(f'{key.split("__")[1]}={value}' for key, value in own.items())


@functools.cache
def on_one_device(settings):
    return train(small_config(**dict(settings)))


@pytest.mark.parametrize(
    'layout',
    [
        *(pytest.param(layout, id=name_of(layout)) for layout in LAYOUTS),
        *(pytest.param(layout, id=name_of(layout), marks=pytest.mark.nightly) for layout in NIGHTLY_LAYOUTS),
    ],
)
def test_steps_equal_those_on_one_device(layout):
    config = small_config(8, **{**COMMON, **layout})
    moments, history = train(config)
    # The load-balancing loss depends on the division into micro-batches.
    one = {key: value for key, value in {**COMMON, **layout}.items() if not key.startswith('mesh__')}
    one['train__per_device_batch_size'] = config.train.global_batch_size // config.accumulation
    expected, expected_history = on_one_device(tuple(sorted(one.items())))
    np.testing.assert_allclose(history[0], expected_history[0], rtol=2e-6)
    np.testing.assert_allclose(history, expected_history, rtol=2e-4)
    for found, there in zip(jax.tree.leaves(moments), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, there, atol=1e-5 * np.abs(there).max() + 1e-9)
    # Negative control: training changes the loss far more than this tolerance.
    assert history[-1, 0] < history[0, 0] - 0.1


def test_the_losses_of_the_router_and_its_bias_change_the_steps():
    """Negative control of the test above: without them, the steps differ by more than its tolerance."""
    settings = {**COMMON, **DEEPSEEK}
    history = on_one_device(tuple(sorted(settings.items())))[1]
    for change in (
        {'train__load_balancing_loss': 0.0},
        {'train__router_z_loss': 0.0},
        {'train__router_bias_rate': 0.1},
    ):
        other = on_one_device(tuple(sorted({**settings, **change}.items())))[1]
        assert np.abs(other / history - 1).max() > 1e-3, change
