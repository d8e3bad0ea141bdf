"""Tests guards and budgets: inconsistent values are rejected, and a budget determines the length of a run."""

import pytest

from maxlm.config import loading
from maxlm.config.resolve import resolve
from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.config.serialization import to_json
from tests.messages import input_error

CONFIG = """
from maxlm.config.loading import default

def get_config():
    config = default()
    config.model.num_layers, config.model.dim, config.model.num_heads = 1, 8, 1
    config.train.num_steps, config.train.global_batch_size = 10, 8
    return config
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.parametrize(
    ('overrides', 'fragments'),
    [
        (['guard.spike_window=15'], ['guard.spike_window=15', '16']),
        (['guard.max_rollbacks=-1'], ['guard.max_rollbacks=-1']),
        (['guard.early_stopping_patience=3'], ['guard.early_stopping_patience=3', 'eval.interval']),
        (['guard.max_dollars=5'], ['guard.max_dollars=5', 'train.price_per_hour']),
        (['train.dollars=5'], ['train.dollars=5', 'train.price_per_hour']),
        (['train.hours=1', 'train.num_steps=5'], ['exactly one of train.hours', 'train.num_steps=5']),
        (['train.hours=1', 'data.seq_len_schedule=((512, 0.5),)'], ['seq_len_schedule', 'guard.max_hours']),
        (
            ['train.hours=1', "data.sources=(('a', 1), ('b', 1))", 'data.sources_schedule=(((1, 2), 0.5),)'],
            ['data.sources_schedule', 'known at the start', 'train.num_steps'],
        ),
    ],
)
def test_invalid_overrides_are_rejected(config_file, overrides, fragments):
    with input_error(*fragments):
        loading.load(config_file, overrides)


@pytest.mark.parametrize(
    'overrides',
    [
        ['guard.spike_window=0'],
        ['guard.spike_window=16', 'guard.rollback_lr_factor=0.5'],
        ['guard.early_stopping_patience=3', 'eval.interval=5'],
        ['guard.max_dollars=5', 'train.price_per_hour=2'],
        ['guard.max_hours=5', 'data.seq_len_schedule=((512, 0.5),)'],
    ],
)
def test_valid_overrides_are_accepted(config_file, overrides):
    assert loading.load(config_file, overrides).train.num_steps == 10


@pytest.mark.parametrize('budget', [['train.hours=2'], ['train.dollars=2', 'train.price_per_hour=1']])
def test_a_budget_replaces_the_number_of_steps(config_file, tmp_path, budget):
    config = loading.load(config_file, budget)
    assert (config.train.hours, config.train.dollars)['dollars' in budget[0]] == 2
    assert config.train.num_steps == 0
    resolved = resolve(config, platform='cpu', num_devices=1, vocab_size=10, windows=8)
    assert resolved.train.num_steps == UNDECIDED_STEPS
    # The config of a run keeps the budget, because the number of steps depends on the machine.
    path = tmp_path / 'config.json'
    path.write_text(to_json(resolved))
    assert loading.load(str(path)).train == config.train.__class__(**{**vars(resolved.train), 'num_steps': 0})
    assert loading.load(str(path), ['train.num_steps=7']).train.num_steps == 7
