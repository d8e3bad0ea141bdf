"""Tests the decoding benchmark on a tiny model."""

import json

import pytest

from benchmarks import decode
from maxlm.errors import InputError

ARGUMENTS = [
    '--config=configs/tiny.py',
    '--config.model.num_layers=1',
    '--config.model.dim=16',
    '--config.model.num_heads=2',
    '--config.model.dtype=float32',
    '--vocab-size=64',
    '--context=40',
    '--passes=3',
]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_written_results(tmp_path, capsys):
    assert decode.main([*ARGUMENTS, '--batches=1,3', '--peer', f'--output={tmp_path}/out.json']) == 0
    one, three = json.loads((tmp_path / 'out.json').read_text())['results']
    assert (one['slots'], three['slots']) == (1, 3)
    # Parameters are read once, and keys and values for every slot: 2 heads of 8 for 40 positions, in float32.
    assert three['bytes'] - one['bytes'] == 2 * (2 * 2 * 8 * 40 * 4)
    assert one['share'] is None
    assert one['tokens_per_second'] == pytest.approx(1 / one['pass_seconds'])
    assert three['tokens_per_second'] == pytest.approx(3 / three['pass_seconds'])
    for result in (one, three):
        assert result['ratio'] == result['transformers']['pass_seconds'] / result['pass_seconds'] > 0
        assert result['transformers']['mode'] == 'none'
    assert capsys.readouterr().out.startswith('batch 1: ')


def test_bandwidth_of_the_chip_is_used(monkeypatch):
    monkeypatch.setattr(decode, 'find_chip', lambda kind: type('Chip', (), {'memory_bandwidth': 1e9}))
    results = []
    monkeypatch.setattr(decode, 'measure', lambda *a: results.append(a) or {'share': 0.5, 'tokens_per_second': 1.0})
    decode.main(ARGUMENTS)
    assert [a[1:] for a in results] == [(1, 40, 3, False, 1e9), (32, 40, 3, False, 1e9)]


def test_invalid_context_length():
    with pytest.raises(InputError, match='--context=100000: must be from 2 to'):
        decode.main([*ARGUMENTS[:-2], '--context=100000'])
