"""Tests data sources and sequence lengths: valid tuples in files, overrides and config.json."""

import dataclasses

import pytest

from maxlm.config.loading import build, default, load
from maxlm.config.resolve import resolve
from maxlm.config.schema import DataConfig
from maxlm.config.serialization import from_json, to_json
from maxlm.errors import InputError
from tests.conftest import ROOT
from tests.messages import input_error


def data_config(**settings):
    values = default()
    values.train.num_steps, values.train.global_batch_size = 100, 8
    for key, value in {'num_layers': 2, 'dim': 32, 'num_heads': 4, 'family': 'llama'}.items():
        values.model[key] = value
    for key, value in {'seq_len': 16, **settings}.items():
        values.data[key] = value
    return build(values)


TWO = {'sources': (('a', 1.0), ('b', 1.0))}


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'sources': (('a', 0.0),)}, ["('a', 0.0)", 'greater than 0']),
        ({'sources': (('a', float('nan')),)}, ['nan', 'greater than 0']),
        ({'sources': (('', 1.0),)}, ["('', 1.0)"]),
        ({'sources': ('a', 1.0)}, ["'a'", 'not a pair of a directory and a weight', 'data/web']),
        ({'sources': (('a', '1'),)}, ["('a', '1')"]),
        ({'sources': (('a', 1), ('a', 2))}, ['a is listed twice']),
        ({**TWO, 'sources_schedule': (((1.0,), 0.5),)}, ['1 weights for 2 entries of data.sources']),
        ({'sources_schedule': (((1.0,), 0.5),)}, ['1 weights for 0 entries of data.sources']),
        ({**TWO, 'sources_schedule': ((0.7, 0.3), 0.8)}, ['(0.7, 0.3) is not a pair of weights and a fraction']),
        ({**TWO, 'sources_schedule': (((1, '1'), 0.5),)}, ["((1, '1'), 0.5): each weight must be"]),
        ({**TWO, 'sources_schedule': (((1, -1), 0.5),)}, ['((1, -1), 0.5): each weight must be']),
        ({**TWO, 'sources_schedule': (((0, 0), 0.5),)}, ['one must be above 0']),
        ({**TWO, 'sources_schedule': (((1, 1), 0.5), ((1, 2), 0.5))}, ['((1, 2), 0.5): the fractions must increase']),
        ({'sources': (('a', 0), ('b', 0)), 'sources_schedule': (((1, 1), 0.5),)}, ['all weights are 0']),
        ({'seq_len_schedule': ((5, 0.5),)}, ['5 does not divide data.seq_len=16']),
        ({'seq_len_schedule': ((1, 0.5),)}, ['1', 'data.seq_len=16']),
        ({'seq_len_schedule': ((8, 1.0),)}, ['fractions must increase']),
        ({'seq_len_schedule': ((8, 1.5),)}, ['fractions must increase']),
        ({'seq_len_schedule': ((4, 0.5), (8, 0.5))}, ['fractions must increase']),
        ({'seq_len_schedule': ((4, 0.5), (8, 0.4))}, ['fractions must increase', '(8, 0.4)']),
        ({'seq_len_schedule': ((8.0, 0.5),)}, ['(8.0, 0.5)']),
        ({'seq_len_schedule': ((16, 0.5),)}, ['does not divide data.seq_len=16']),
        ({'seq_len_schedule': (4, 0.5)}, ['not a pair of a length and a fraction']),
        (
            {'seq_len_schedule': ((8, 0.5),), 'rows': 'documents'},
            ['data.seq_len_schedule=((8, 0.5),) with data.rows=documents', 'data.rows=stream'],
        ),
        ({'shuffle_shards': -1}, ['data.shuffle_shards=-1']),
        ({'warn_epochs': 0.5}, ['data.warn_epochs=0.5']),
        ({'cache_limit_gib': -1.0}, ['data.cache_limit_gib']),
        ({'download_threads': 0}, ['data.download_threads']),
    ],
)
def test_invalid_settings_are_rejected(settings, fragments):
    with input_error(*fragments):
        data_config(**settings)


VALID = {
    'sources': (('data/web', 0.0), ('data/code#python', 3)),
    'sources_schedule': (((1, 1), 0.25), ((3.0, 1), 0.5)),
    'seq_len_schedule': ((4, 0.25), (8, 0.5)),
}


def test_tuples_in_json_and_overrides():
    config = data_config(**VALID)
    assert from_json(to_json(config)) == config
    overrides = [f'data.{key}={value!r}' for key, value in VALID.items()]
    loaded = load(str(ROOT / 'configs/tiny.py'), [*overrides, 'data.seq_len=16'])
    assert tuple(getattr(loaded.data, key) for key in VALID) == tuple(VALID.values())
    for text in ('3', 'a', "[('a', 1)]", '(', '__import__("os")'):
        with pytest.raises(InputError, match='must be a tuple'):
            load(str(ROOT / 'configs/tiny.py'), [f'data.sources={text}'])


def test_phases_of_schedules():
    config = data_config(**VALID)
    config = resolve(config, platform='cpu', num_devices=1, vocab_size=100, windows=1000)
    assert config.contexts == [(0, 4), (25, 8), (50, 16)]
    assert [config.context_at(step) for step in (0, 24, 25, 49, 50, 99)] == [4, 4, 8, 8, 16, 16]
    short = config.at_context(4)
    assert (short.data.seq_len, short.train.global_batch_size, short.train.per_device_batch_size) == (4, 32, 32)
    assert short.accumulation == config.accumulation
    assert dataclasses.replace(short, data=config.data, train=config.train) == config
    assert config.at_context(16) == config
    assert config.source_stages == ((0, (1, 1)), (25, (3.0, 1)), (50, (0.0, 3)))
    assert config.data.source_fractions == (0.125 + 0.1875, 0.125 + 0.0625 + 0.5)
    plain = resolve(data_config(), platform='cpu', num_devices=1, vocab_size=100, windows=1000)
    assert (plain.contexts, plain.source_stages, plain.data.source_fractions) == ([(0, 16)], (), ())


def test_defaults_read_one_directory():
    assert (DataConfig().path, DataConfig().sources, DataConfig().seq_len_schedule) == ('data', (), ())
