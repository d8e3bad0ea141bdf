"""The examples in docstrings of config, step, optimizers, losses and sampling run, and show what they print."""

import doctest
import importlib

import pytest

MODULES = (
    'maxlm.config.validation_optimizer',
    'maxlm.inference.sampling',
    'maxlm.rl.token_rewards',
    'maxlm.training.losses.advantages',
    'maxlm.training.losses.cross_entropy',
    'maxlm.training.losses.distillation',
    'maxlm.training.losses.grpo',
    'maxlm.training.optimizers.muon',
    'maxlm.training.optimizers.orthogonalization',
    'maxlm.training.optimizers.schedule',
    'maxlm.training.step',
    'maxlm.training.update',
)


@pytest.mark.parametrize('module', MODULES)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
