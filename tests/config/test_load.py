"""Reading configs: files, variants, overrides, and every way to get them wrong."""

import pytest
from ml_collections import ConfigDict

from maxlm.config import load
from maxlm.errors import InputError

CONFIG = """
from maxlm.config.load import default

def get_config(variant=''):
    config = default()
    config.model.num_layers = 24 if variant == 'big' else 2
    config.model.dim = 64
    config.model.num_heads = 4
    config.train.num_steps = 10
    config.train.global_batch = 8
    return config
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / 'base.py'
    path.write_text(CONFIG)
    return str(path)


def test_variant_and_overrides(config_file):
    config = load.load(f'{config_file}:big', ['train.num_steps=1e3', 'model.use_bias=false', 'model.dropout=0.5'])
    assert (config.model.num_layers, config.train.num_steps) == (24, 1000)
    assert config.model.use_bias is False
    assert config.model.dropout == 0.5
    assert load.load(config_file).model.num_layers == 2


def test_family_fills_what_is_left_open_and_nothing_else(config_file):
    gpt2 = load.load(config_file).model
    assert (gpt2.norm, gpt2.position, gpt2.tie_embeddings) == ('layernorm', 'learned', True)
    llama = load.load(config_file, ['model.family=llama', 'model.norm=layernorm']).model
    assert (llama.norm, llama.position, llama.tie_embeddings) == ('layernorm', 'rotary', False)


def test_an_overridden_length_replaces_the_one_of_the_file(config_file):
    train = load.load(config_file, ['train.num_tokens=1e6']).train
    assert (train.num_steps, train.num_tokens) == (0, 1_000_000)


def test_split_overrides():
    overrides, rest = load.split_overrides(
        ['--config=a.py', '--config.train.num_steps=2', '--workdir', 'x', '--config.model.dim', '64']
    )
    assert overrides == ['train.num_steps=2', 'model.dim=64']
    assert rest == ['--config=a.py', '--workdir', 'x']


def test_json_round_trip(config_file):
    config = load.load(config_file, ['optimizer.learning_rate=1e-3'])
    assert load.from_json(load.to_json(config)) == config
    assert load.from_json(load.to_json(config)) != load.load(config_file)


@pytest.mark.parametrize(
    ('override', 'words'),
    [
        ('train.num_step=5', ['train.num_step', "'num_steps'"]),
        ('train.learning_rate=1', ["'optimizer.learning_rate'"]),
        ('trian.num_steps=5', ["'trian'", "'train'"]),
        ('train.num_steps=ten', ['train.num_steps', "'ten'", 'whole number']),
        ('train.num_steps=1.5', ["'1.5'", 'whole number']),
        ('train.num_steps=inf', ["'inf'", 'whole number']),
        ('model.use_bias=maybe', ["'maybe'", 'true or false']),
        ('model.dropout=nan', ['model.dropout', 'nan']),
        ('optimizer.learning_rate=fast', ["'fast'", 'a number']),
        ('model.family=lama', ["'lama'", "'llama'"]),
        ('model.remat=some', ['model.remat', 'none, dots']),
        ('model.num_heads=7', ['model.num_heads=7', 'model.dim=64', '8']),
        ('model.num_kv_heads=3', ['model.num_kv_heads=3', 'model.num_heads=4']),
        ('train.global_batch=0', ['exactly one of', 'train.global_batch_tokens']),
        ('train.global_batch_tokens=1000', ['data.window=1024', '1024']),
        ('data.window=1', ['data.window=1', 'at least 2']),
        ('model.dropout=1', ['model.dropout=1', 'below 1']),
        ('optimizer.min_learning_rate=1', ['optimizer.min_learning_rate', 'optimizer.learning_rate']),
        ('mesh.data=-1', ['mesh.data', 'mesh.fsdp', '-1']),
        ('mesh.tensor=0', ['mesh.tensor=0']),
        ('model.max_positions=64', ['model.max_positions=64', 'data.window=1024']),
    ],
)
def test_a_wrong_override_is_one_line_that_names_it(config_file, override, words):
    with pytest.raises(InputError) as error:
        load.load(config_file, [override])
    message = str(error.value)
    assert '\n' not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('x = (', ['base.py', 'SyntaxError']),
        ('def get_config():\n    return undefined', ['base.py:2', 'NameError']),
        ('x = 1', ['get_config']),
        ('def get_config():\n    return {}', ['dict', 'ConfigDict']),
        (CONFIG.replace('num_steps', 'num_stepz'), ['num_stepz', 'num_steps']),
        (CONFIG.replace('= 64', "= 'wide'"), ['base.py:7', 'TypeError']),
        (CONFIG.replace("variant=''", ''), ['base.py', 'NameError']),
    ],
)
def test_a_wrong_config_file_is_named(tmp_path, text, words):
    path = tmp_path / 'base.py'
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load.load(str(path))
    for word in words:
        assert word in str(error.value)


def test_missing_file_and_unknown_variant(config_file):
    with pytest.raises(InputError, match=r'did you mean .*base\.py'):
        load.load(config_file.replace('base', 'bass'))
    with open(config_file, 'a') as file:
        file.write('\ndef get_config():\n    return default()\n')
    with pytest.raises(InputError, match='no variants'):
        load.load(f'{config_file}:big')


def test_a_section_or_key_that_was_forced_into_an_unlocked_config_is_found():
    values = load.default()
    with values.unlocked():
        values.train.surprise = 1
    with pytest.raises(InputError, match=r'train\.surprise'):
        load.build(values)
    with pytest.raises(InputError, match='extra'):
        load.build(ConfigDict({'extra': {}}))
