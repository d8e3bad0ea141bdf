"""`maxlm.Config`: the same values as the commands, and one-line errors."""

import dataclasses

import jax
import pytest

import maxlm
from maxlm.config.loading import load
from maxlm.config.serialization import flatten, make_config
from maxlm.errors import InputError


def test_overrides_are_those_of_the_command_line():
    overrides = {
        'train.num_tokens': 4e5,
        'eval.sample_prompts': ('import ', 'def'),
        'metrics.tensorboard': False,
        'optimizer.max_grad_norm': 0.5,
        'train.per_device_batch_size': 'auto',
    }
    config = maxlm.Config.get('tiny', overrides)
    texts = [f'{key}={value}' for key, value in overrides.items()]
    assert flatten(config) == flatten(load('tiny', texts))
    # `replace` gives the same result, and leaves the original unchanged.
    original = maxlm.Config.get('tiny')
    assert original.replace(overrides) == config != original


def test_replace_overrides_alternatives():
    config = maxlm.Config.get('tiny', {'train.num_steps': 7})
    changed = config.replace({'train.num_tokens': 1000})
    assert (changed.train.num_steps, changed.train.num_tokens) == (0, 1000)


def test_a_resolved_config_has_explicit_sizes(dataset):
    data = maxlm.Dataset.open(dataset)
    config = maxlm.Config.get('tiny', {'train.num_epochs': 1}).resolve(data)
    assert config.data.path == str(dataset)
    assert config.model.vocab_size == data.vocab_size
    assert config.train.num_steps > 0
    assert maxlm.make_mesh(config).mesh.size == jax.device_count()
    with pytest.raises(InputError, match='does not cover 8 devices'):
        maxlm.make_mesh(maxlm.Config.get('tiny'))


def test_a_config_is_frozen_in_all_parts():
    config = maxlm.Config.get('tiny')
    for owner, name in ((config, 'lr'), (config, 'train'), (config.train, 'num_steps'), (config.train, 'steps')):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(owner, name, 3)


def test_the_representation_lists_the_changes_without_secrets():
    changes = {'model.num_layers': 2, 'alerts.command': 'send 5f3c'}
    config = maxlm.Config.get('tiny', changes)
    text = repr(config)
    assert text.startswith("Config({'model.family': 'llama', ")
    assert '5f3c' not in text
    assert 'optimizer.max_grad_norm' not in text
    shown = eval(text.removeprefix('Config'))
    assert shown['model.num_layers'] == 2
    # The shown changes of the defaults are all that the config contains.
    del shown['alerts.command']
    defaults = flatten(make_config({'model': {'family': 'llama'}}))
    assert flatten(config.replace({'alerts.command': ''})) == defaults | shown


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: maxlm.Config.get('tinny'), "did you mean 'tiny'"),
        (lambda: maxlm.Config.get('tiny', {'train.steps': 1}), 'config key train.steps does not exist'),
        (lambda: maxlm.Config.get('tiny').replace({'train.num_steps': -1}), 'train.num_steps=-1'),
        (lambda: maxlm.Config.get('tiny').replace({'model.family': 'gpt2'}), 'model.family=gpt2'),
    ],
)
def test_wrong_values(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize('value', ['tiny', {'num_layers': 2}])
def test_a_name_or_values_are_no_sections(value):
    with pytest.raises(TypeError, match=r'^Config\(model=.*\): not a section; use Config.get\(NAME, OVERRIDES\)$'):
        maxlm.Config(value)
