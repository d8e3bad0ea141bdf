"""Declarations of config keys: each allows a finite range or choices, and rejects other values in one line."""

import json
import math

import pytest

from maxlm.config import loading
from maxlm.config.keys import declared_keys
from maxlm.config.sections.model import FAMILY
from maxlm.config.sections.ranges import Range
from maxlm.errors import InputError
from tests.small import small_config

NUMERIC = {name: key for name, key in declared_keys().items() if key.kind in (int, float)}
# Values that no key accepts, and values that some keys accept.
EXTREME = ('inf', '-inf', 'nan', '1e30', '-1e30')
UNUSUAL = ('0', '-1', '1e6', '1e-30')


@pytest.fixture(scope='module')
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp('config') / 'small.py'
    path.write_text(
        'from maxlm.config.loading import default\n'
        'def get_config():\n'
        '    config = default()\n'
        '    config.model.num_layers, config.model.dim, config.model.num_heads = 2, 64, 2\n'
        '    config.train.num_steps, config.train.global_batch_size = 20, 8\n'
        '    return config\n'
    )
    return str(path)


def test_every_numeric_key_has_a_finite_range():
    for name, key in declared_keys().items():
        assert (key.range is not None) == (key.kind in (int, float) and not key.choices), name
        assert key.range is None or -1 <= key.range.low < key.range.high <= 1e18, name


def test_every_default_is_accepted():
    # Required keys and keys set by a family have no default.
    required = {'model.num_layers', 'model.dim', 'model.num_heads'}
    for name, key in declared_keys().items():
        if name not in required and key.default is not FAMILY:
            key.check(key.default)
            assert type(key.default) is key.kind, name


def error_message(config_file, key, text):
    """Returns the message that rejects an override, or '' if it is accepted."""
    try:
        config = loading.load(config_file, [f'{key}={text}'])
    except InputError as error:
        return str(error)
    section, name = key.split('.')
    # An accepted value is stored unchanged.
    assert getattr(getattr(config, section), name) == float(text)
    return ''


@pytest.mark.parametrize('text', EXTREME)
def test_extreme_numbers_are_rejected(config_file, text):
    for key in NUMERIC:
        message = error_message(config_file, key, text)
        assert message.startswith(f'{key}='), key
        assert '\n' not in message
        assert len(message) < 250


@pytest.mark.parametrize('text', UNUSUAL)
def test_unusual_numbers_are_in_the_range_or_rejected_by_name(config_file, text):
    for key in NUMERIC:
        message = error_message(config_file, key, text)
        # A rule about several keys may name another key first.
        allowed = NUMERIC[key].range
        assert key.partition('.')[2] in message if message else allowed is None or float(text) in allowed, key
        assert '\n' not in message


@pytest.mark.parametrize('value', [10**400, -(10**400), math.inf, math.nan])
@pytest.mark.parametrize('key', ['train.num_steps', 'optimizer.learning_rate'])
def test_numbers_in_python_configs(key, value):
    with pytest.raises(InputError, match=f'^{key}=.*must be (finite, )?(at least|greater than) 0') as error:
        declared_keys()[key].check(value)
    assert len(str(error.value)) < 100


@pytest.mark.parametrize('text', ['Infinity', 'NaN', '-1', '1e30', '1' * 400])
def test_numbers_in_a_config_json(config_file, text):
    written = loading.to_json(loading.load(config_file))
    assert loading.from_json(written)
    with pytest.raises(ValueError, match='learning_rate'):
        loading.from_json(written.replace('"learning_rate": 0.0003', f'"learning_rate": {text}'))


@pytest.mark.parametrize(
    ('allowed', 'inside', 'outside', 'words'),
    [
        (Range(0, 1), (0, 0.5, 1), (-0.1, 1.1, math.inf, math.nan), 'at least 0 and at most 1'),
        (Range(0, 1, above=True), (1e-300, 1), (0, math.nan), 'greater than 0 and at most 1'),
        (Range(0, 1, below=True), (0, 0.999), (1, math.nan), 'at least 0 and below 1'),
        (Range(1, 2, or_zero=True), (0, 1, 2), (0.5, -1, math.nan), 'at least 1 and at most 2, or 0'),
    ],
)
def test_a_range(allowed, inside, outside, words):
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert str(allowed) == words


@pytest.mark.parametrize(('key', 'value'), [('dtype', 'int8'), ('family', 'x'), ('activation', ''), ('init', 'other')])
def test_written_configs_have_valid_choices(key, value):
    written = loading.to_json(small_config())
    values = json.loads(written)
    values['model'][key] = value
    assert loading.from_json(written)
    with pytest.raises(ValueError, match=f'model.{key}={value!r}: must be one of'):
        loading.from_json(json.dumps(values))
