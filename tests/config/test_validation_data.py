"""Tests data sources and sequence lengths: valid tuples in files, overrides and config.json."""

import dataclasses

import pytest

from maxlm.config.loading import build, default, from_json, load, to_json
from maxlm.config.resolve import resolve
from maxlm.config.schema import DataConfig
from maxlm.errors import InputError
from tests.conftest import ROOT


def data_config(**settings):
    values = default()
    values.train.num_steps, values.train.global_batch_size = 100, 8
    for key, value in {'num_layers': 2, 'dim': 32, 'num_heads': 4, 'family': 'llama'}.items():
        values.model[key] = value
    for key, value in {'seq_len': 16, **settings}.items():
        values.data[key] = value
    return build(values)


@pytest.mark.parametrize(
    ('settings', 'words'),
    [
        ({'sources': (('a', 0.0),)}, ["('a', 0.0)", 'above 0']),
        ({'sources': (('a', float('nan')),)}, ['nan', 'above 0']),
        ({'sources': (('', 1.0),)}, ["('', 1.0)"]),
        ({'sources': ('a', 1.0)}, ["'a'", 'directory and a weight', 'data/web']),
        ({'sources': (('a', '1'),)}, ["('a', '1')"]),
        ({'sources': (('a', 1), ('a', 2))}, ['a is listed twice']),
        ({'seq_len_schedule': ((5, 0.5),)}, ['5', 'data.seq_len=16']),
        ({'seq_len_schedule': ((1, 0.5),)}, ['1', 'data.seq_len=16']),
        ({'seq_len_schedule': ((8, 1.0),)}, ['fractions must increase']),
        ({'seq_len_schedule': ((4, 0.5), (8, 0.4))}, ['fractions must increase', '(8, 0.4)']),
        ({'seq_len_schedule': ((8.0, 0.5),)}, ['(8.0, 0.5)']),
        ({'shuffle_shards': -1}, ['data.shuffle_shards=-1']),
        ({'warn_epochs': 0.5}, ['data.warn_epochs=0.5']),
        ({'cache_limit_gib': -1.0}, ['data.cache_limit_gib']),
        ({'download_threads': 0}, ['data.download_threads']),
    ],
)
def test_invalid_settings_are_rejected(settings, words):
    with pytest.raises(InputError) as error:
        data_config(**settings)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value)


VALID = {'sources': (('data/web', 0.7), ('data/code#python', 3)), 'seq_len_schedule': ((4, 0.25), (8, 0.5))}


def test_tuples_in_json_and_overrides():
    config = data_config(**VALID)
    assert from_json(to_json(config)) == config
    overrides = [f'data.{key}={value!r}' for key, value in VALID.items()]
    loaded = load(str(ROOT / 'configs/tiny.py'), [*overrides, 'data.seq_len=16'])
    assert (loaded.data.sources, loaded.data.seq_len_schedule) == tuple(VALID.values())
    for text in ('3', 'a', "[('a', 1)]", '(', '__import__("os")'):
        with pytest.raises(InputError, match='must be a tuple'):
            load(str(ROOT / 'configs/tiny.py'), [f'data.sources={text}'])


def test_phases_of_a_sequence_length_schedule():
    config = data_config(**VALID)
    config = resolve(config, platform='cpu', num_devices=1, vocab_size=100, windows=1000)
    assert config.contexts == [(0, 4), (25, 8), (50, 16)]
    assert [config.context_at(step) for step in (0, 24, 25, 49, 50, 99)] == [4, 4, 8, 8, 16, 16]
    short = config.at_context(4)
    assert (short.data.seq_len, short.train.global_batch_size, short.train.per_device_batch_size) == (4, 32, 32)
    assert short.accumulation == config.accumulation
    assert dataclasses.replace(short, data=config.data, train=config.train) == config
    assert config.at_context(16) == config
    plain = resolve(data_config(), platform='cpu', num_devices=1, vocab_size=100, windows=1000)
    assert plain.contexts == [(0, 16)]


def test_defaults_read_one_directory():
    assert (DataConfig().path, DataConfig().sources, DataConfig().seq_len_schedule) == ('data', (), ())
