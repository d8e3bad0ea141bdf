"""Tests of the settings of multi-token prediction."""

from __future__ import annotations

import pytest

from maxlm.errors import InputError
from tests.small import small_config

MTP = {'model__mtp_depth': 1}


@pytest.mark.parametrize(
    ('num_devices', 'settings', 'words'),
    [
        (1, {'model__mtp_depth': 17}, ['model.mtp_depth=17', 'at most 16']),
        (1, {**MTP, 'train__mtp_loss_weight': 0.0}, ['train.mtp_loss_weight=0.0', 'greater than 0']),
        (1, {**MTP, 'train__objective': 'dpo', 'train__init_from': 'x'}, ['model.mtp_depth=1', 'objective=dpo']),
        (2, {**MTP, 'mesh__context': 2}, ['model.mtp_depth=1', 'mesh.context=2', 'model.mtp_depth=0']),
        (
            2,
            {**MTP, 'mesh__stage': 2, 'train__per_device_batch_size': 1},
            ['model.mtp_depth=1', 'mesh.stage=2', 'model.mtp_depth=0'],
        ),
    ],
)
def test_invalid_settings_of_multi_token_prediction(num_devices, settings, words):
    with pytest.raises(InputError) as error:
        small_config(num_devices, **settings)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value)
    # Control: without modules the settings are valid, except for the ranges.
    if 'mtp_depth=1' in words[0]:
        small_config(num_devices, **{**settings, 'model__mtp_depth': 0})
