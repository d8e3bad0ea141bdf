"""Tests that configs for training quantized weights are rejected."""

import pytest

from maxlm.errors import InputError
from tests.small import small_config


@pytest.mark.parametrize(
    ('settings', 'words'),
    [
        (
            {'model__weight_quantization': 'int8'},
            ['model.weight_quantization=int8', 'cannot be trained', 'maxlm quantize'],
        ),
        ({'model__weight_quantization': 'int3'}, ['model.weight_quantization', "'int3'", 'int4']),
        ({'model__quantization_group_size': -1}, ['model.quantization_group_size=-1', 'at least 0']),
    ],
)
def test_invalid_settings_are_rejected(settings, words):
    with pytest.raises(InputError) as error:
        small_config(**settings)
    for word in words:
        assert word in str(error.value)
    assert '\n' not in str(error.value)


def test_floats_are_the_default():
    assert small_config(model__weight_quantization='float').model == small_config().model
