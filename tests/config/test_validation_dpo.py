"""Tests that values of section dpo must be consistent with each other and with the data."""

import pytest

from maxlm.config.loading import build, default
from tests.messages import input_error


def make(objective='dpo', **settings):
    values = default()
    values.model.num_layers, values.model.dim, values.model.num_heads = 1, 8, 1
    values.train.num_steps, values.train.global_batch_size, values.train.objective = 1, 1, objective
    values.train.init_from = 'start'
    for key, value in settings.items():
        section, name = key.split('__')
        values[section][name] = value
    return build(values)


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
