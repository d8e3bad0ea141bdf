"""Tests the ranges of the options of the residual stream."""

import pytest

from maxlm.errors import InputError
from tests.small import model_keys, small_config


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'smear_channels': 33}, r'model\.smear_channels=33 exceeds model\.dim=32.*set it to 32 or less'),
        ({'smear_channels': -1}, r'model\.smear_channels'),
        (
            {'backout_layer': 2},
            r'model\.backout_layer=2 is none of the layers 0 to 1; use 1 as nanochat, or -1 for none',
        ),
        ({'backout_layer': -2}, r'model\.backout_layer'),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        small_config(**model_keys(**settings))


def test_the_largest_values_are_accepted():
    model = small_config(**model_keys(smear_channels=32, backout_layer=1)).model
    assert (model.smear_channels, model.backout_layer) == (32, 1)
