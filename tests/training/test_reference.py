"""Reference parameters of DPO and GRPO in the state, and their dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.training.reference import has_reference_params, stored_dtype, to_reference, without_adapters
from tests.small import small_config

DPO = {'train__objective': 'dpo', 'train__init_from': 'runs/sft', 'model__dtype': 'bfloat16'}
ADAPTERS = {'model__family': 'llama', 'model__lora_rank': 2}


@pytest.mark.parametrize(
    ('settings', 'holds'),
    [
        ({}, False),
        (DPO, True),
        # The model without adapters is the reference, unless other parameters are trained too.
        ({**DPO, **ADAPTERS}, False),
        ({**DPO, **ADAPTERS, 'optimizer__trainable_params': ('embedding',)}, True),
        (ADAPTERS, False),
    ],
)
def test_a_state_contains_a_reference_unless_the_model_is_its_own(settings, holds):
    assert has_reference_params(small_config(**settings)) is holds


def test_rewards_need_a_reference_only_for_its_divergence():
    config = small_config()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, objective='grpo'))
    assert not has_reference_params(config)
    assert has_reference_params(dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, kl_coef=0.1)))


def test_each_kind_is_stored_in_its_compute_dtype():
    config = small_config(**DPO)
    in_8_bits = dataclasses.replace(config, model=dataclasses.replace(config.model, matmul_precision='fp8'))
    kinds = ('table', 'head', 'matrix', 'vector')
    assert [stored_dtype(config, kind) for kind in kinds] == [jnp.bfloat16] * 3 + [jnp.float32]
    # fp8 products round the float32 parameter, so it is stored in float32.
    assert [stored_dtype(in_8_bits, kind) for kind in kinds] == [jnp.bfloat16] * 2 + [jnp.float32] * 2


def test_a_reference_is_a_copy():
    params = {'embedding': jnp.full((2, 2), 1.001), 'final_norm': {'scale': jnp.full(2, 1.001)}}
    reference = to_reference(small_config(**DPO), params)
    assert jax.tree.map(lambda leaf: leaf.dtype.name, reference) == {
        'embedding': 'bfloat16',
        'final_norm': {'scale': 'float32'},
    }
    np.testing.assert_array_equal(reference['final_norm']['scale'], params['final_norm']['scale'])
    # A step donates the parameters, so the reference must not share their memory.
    pointers = [tree['final_norm']['scale'].unsafe_buffer_pointer() for tree in (params, reference)]
    assert pointers[0] != pointers[1]


def test_disabled_adapters_add_nothing():
    ones = np.ones(3, np.float32)
    params = {'query': {'kernel': ones, 'lora_a': ones, 'lora_b': ones}, 'norm': {'scale': ones}}
    off = without_adapters(params)
    assert off['norm'] == params['norm']
    assert {name: bool(np.any(value)) for name, value in off['query'].items()} == {
        'kernel': True,
        'lora_a': True,
        'lora_b': False,
    }
    assert params['query']['lora_b'].all()
