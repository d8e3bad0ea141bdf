"""Tests which projections can have adapters, and errors for unknown names."""

import pytest

from maxlm.errors import InputError
from tests.small import small_config

GELU = 'attention.query, attention.key, attention.value, attention.out, feedforward.up, feedforward.down'
SWIGLU = GELU.replace('feedforward.up', 'feedforward.gate, feedforward.up')


@pytest.mark.parametrize(
    ('family', 'targets', 'message'),
    [
        (
            'gpt2',
            ('q_proj',),
            f"model.lora_target_modules: 'q_proj' matches no projection of a block; available: {GELU}",
        ),
        (
            'llama',
            ('attention.*', 'mlp.*'),
            f"model.lora_target_modules: 'mlp.*' matches no projection.* available: {SWIGLU}",
        ),
        # This family's blocks have no gate.
        ('gpt2', ('*.gate',), f"'\\*.gate' matches no projection of a block; available: {GELU}"),
        ('gpt2', ('ATTENTION.*',), "'ATTENTION.*' matches no projection"),
        ('gpt2', (3,), 'model.lora_target_modules: 3 matches no projection'),
        (
            'gpt2',
            (),
            rf'model.lora_target_modules=\(\) with model.lora_rank=4: set one or more patterns.*available: {GELU}',
        ),
    ],
)
def test_patterns_without_a_match(family, targets, message):
    with pytest.raises(InputError, match=message):
        small_config(model__family=family, model__lora_rank=4, model__lora_target_modules=targets)
    # Without adapters, the names are not checked.
    small_config(model__family=family, model__lora_target_modules=targets)


@pytest.mark.parametrize('targets', [('*',), ('attention.query',), ('*.gate', 'attention.*'), ('*.[qk]*', '*.value')])
def test_patterns_with_a_match(targets):
    assert (
        small_config(model__family='llama', model__lora_rank=4, model__lora_target_modules=targets).model.lora_rank == 4
    )
