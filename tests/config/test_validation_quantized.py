"""Quantized weights are not trained, and a config that says so is refused."""

import pytest

from maxlm.errors import InputError
from tests.small import small_config


@pytest.mark.parametrize(
    ('settings', 'words'),
    [
        ({'model__weights': 'int8'}, ['model.weights=int8', 'not trained', 'maxlm.quantize']),
        ({'model__weights': 'int3'}, ['model.weights', "'int3'", 'int4']),
        ({'model__weights_group': -1}, ['model.weights_group=-1', 'at least 0']),
    ],
)
def test_refusals(settings, words):
    with pytest.raises(InputError) as info:
        small_config(**settings)
    for word in words:
        assert word in str(info.value)
    assert '\n' not in str(info.value)


def test_floats_are_the_default():
    assert small_config(model__weights='float').model == small_config().model
