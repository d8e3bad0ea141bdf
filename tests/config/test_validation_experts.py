"""Error messages for the keys of experts."""

import pytest

from maxlm.errors import InputError
from tests.small import EXPERTS, small_config


def error(num_devices=1, **settings):
    with pytest.raises(InputError) as caught:
        small_config(num_devices, **{**EXPERTS, **settings})
    return str(caught.value)


def test_values_that_work():
    model = small_config(**EXPERTS).model
    assert (model.expert_matmul, model.expert_ffn_dim) == ('loop', 16)
    assert small_config(**{**EXPERTS, 'model__expert_ffn_dim': 0}).model.expert_ffn_dim == model.ffn_dim
    small_config(**{**EXPERTS, 'model__num_expert_groups': 2, 'model__expert_group_score': 'top2'})
    assert small_config(8, **EXPERTS, mesh__expert=4).batch_shards == 8


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'model__num_experts': 0}, 'model.num_experts_per_token=2 has no effect with model.num_experts=0'),
        ({'model__num_experts_per_token': 5}, 'num_experts_per_token=5: must be at least 1 and at most model.num_exp'),
        ({'model__num_experts_per_token': 0}, 'num_experts_per_token=0: must be at least 1'),
        ({'model__num_dense_layers': 3}, 'leaves none of model.num_layers=3 with experts; set it to at most 2'),
        ({'model__num_expert_groups': 3}, 'num_expert_groups=3 does not divide model.num_experts=4'),
        ({'model__num_expert_groups': 4}, 'must contain model.num_experts_per_token=2 experts; set it between 2 and 4'),
        (
            {'model__num_expert_groups': 4, 'model__num_groups_per_token': 2, 'model__expert_group_score': 'top2'},
            'requires groups of 2 experts or more',
        ),
        ({'model__matmul_precision': 'fp8'}, 'does not support model.num_experts=4; set model.matmul_precision=def'),
        (
            {'model__router_balance_bias': True, 'mesh__host_offload': 'all'},
            'does not support mesh.host_offload=all; set mesh.host_offload=optimizer',
        ),
        ({'model__expert_matmul': 'tokamax'}, 'not available on cpu devices'),
    ],
)
def test_values_that_do_not(settings, fragments):
    assert fragments in error(**settings)


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        (
            {'mesh__expert': 8},
            'mesh.expert=8 does not divide model.num_experts=4; on 8 devices mesh.expert can be 1, 2, 4',
        ),
        ({'mesh__tensor': 4, 'model__expert_ffn_dim': 18}, 'mesh.tensor=4 does not divide model.expert_ffn_dim=18'),
        (
            {'mesh__stage': 4, 'mesh__data': 2, 'train__per_device_batch_size': 1},
            'does not split model.num_layers=3 without model.num_dense_layers=1 into equal parts; use one of: 2 × 1',
        ),
        (
            {'mesh__context': 2, 'model__expert_capacity_factor': 1.25},
            'is per sequence, so it does not support mesh.con',
        ),
    ],
)
def test_meshes_that_do_not(settings, fragments):
    assert fragments in error(8, **settings)


def test_the_expert_axis_requires_experts():
    with pytest.raises(InputError, match=r'mesh\.expert=2 requires a model with experts'):
        small_config(8, mesh__expert=2)
