"""Tests that values of section dpo must be consistent with each other and with the data."""

import pytest

from tests.messages import input_error
from tests.small import build_config, model_keys


def make(objective='dpo', **settings):
    model = model_keys(num_layers=1, dim=8, num_heads=1)
    train = {'num_steps': 1, 'global_batch_size': 1, 'objective': objective, 'init_from': 'start'}
    return build_config(**model, **{f'train__{key}': value for key, value in train.items()}, **settings)


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'dpo__label_smoothing': 0.5}, ['dpo.label_smoothing=0.5', 'below 0.5']),
        ({'dpo__label_smoothing': 0.1, 'dpo__loss_type': 'ipo'}, ['dpo.label_smoothing=0.1', 'dpo.loss_type=ipo']),
        ({'dpo__rpo_alpha': 1.0, 'dpo__loss_type': 'kto'}, ['dpo.rpo_alpha=1.0', 'dpo.loss_type=kto']),
        ({'dpo__label_smoothing': 0.1, 'dpo__loss_type': 'kto'}, ['dpo.label_smoothing=0.1', 'dpo.loss_type=kto']),
        ({'dpo__desirable_weight': 2.0}, ['dpo.desirable_weight=2.0', 'dpo.loss_type=sigmoid']),
        ({'data__document_mask': False}, ['data.document_mask=False', 'dpo', 'True']),
        ({'data__seq_len_schedule': ((512, 0.5),), 'data__seq_len': 1024}, ['data.seq_len_schedule', 'dpo']),
    ],
)
def test_invalid_settings_are_rejected(settings, fragments):
    with input_error(*fragments):
        make(**settings)


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'dpo__label_smoothing': 0.49},
        {'dpo__loss_type': 'ipo', 'dpo__rpo_alpha': 1.0},
        {'dpo__loss_type': 'kto', 'dpo__desirable_weight': 2.0, 'dpo__undesirable_weight': 0.5},
        {'objective': 'next_token', 'data__document_mask': False},
        {'objective': 'next_token', 'data__seq_len_schedule': ((512, 0.5),), 'data__seq_len': 1024},
    ],
)
def test_valid_settings_are_accepted(settings):
    assert make(**settings).dpo.beta == 0.1
