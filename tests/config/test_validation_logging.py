"""Tests that invalid values of logging keys are rejected by name."""

import pytest

from maxlm.config.loading import load
from maxlm.errors import InputError
from tests.conftest import ROOT
from tests.messages import input_error

TINY = str(ROOT / 'configs/tiny.py')


@pytest.mark.parametrize(
    ('override', 'fragments'),
    [
        ("eval.sample_prompts=('a', 3)", ['eval.sample_prompts: 3 is not a non-empty string', "('Once upon a time',)"]),
        ("eval.sample_prompts=('',)", ["eval.sample_prompts: '' is not a non-empty string"]),
        ("eval.sample_prompts=('a')", ['eval.sample_prompts', 'must be a tuple']),
    ],
)
def test_invalid_values_are_rejected(override, fragments):
    with input_error(*fragments):
        load(TINY, [override])


def test_a_utilization_alert_requires_samples():
    for key in ('min_utilization', 'max_host_memory'):
        load(TINY, [f'alerts.{key}=50'])
        with pytest.raises(InputError, match=rf'{key}=50 needs samples .*device_stats_interval_seconds=0; set'):
            load(TINY, [f'alerts.{key}=50', 'metrics.device_stats_interval_seconds=0'])


def test_a_project_is_required_only_with_wandb():
    load(TINY, ['metrics.wandb_project='])
    with pytest.raises(InputError, match=r'metrics\.wandb_project'):
        load(TINY, ['metrics.wandb=offline', 'metrics.wandb_project='])


def test_valid_values_are_accepted():
    config = load(TINY, ["eval.sample_prompts=('Once upon a time', 'def main(')", 'profile.start_step=5'])
    assert config.eval.sample_prompts == ('Once upon a time', 'def main(')
    assert (config.profile.start_step, config.metrics.wandb) == (5, '')
