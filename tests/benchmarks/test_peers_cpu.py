"""Slow: each side is a process that imports its library, about five seconds of a core."""

import json

import pytest

from benchmarks import peers_cpu

TINY = {'num_layers': 1, 'dim': 32, 'num_heads': 2, 'window': 16, 'batch': 2, 'vocab_size': 65}


@pytest.fixture(autouse=True)
def two_small_sides(monkeypatch):
    monkeypatch.setattr(peers_cpu, 'PEERS', ('maxlm', 'torch'))
    monkeypatch.setattr(peers_cpu, 'SIZES', {'tiny': TINY})
    monkeypatch.setattr(peers_cpu, 'TURN_SECONDS', 0.05)


def test_both_sides_compute_the_same_and_are_timed(tmp_path, capsys):
    output = tmp_path / 'peers.json'
    assert peers_cpu.main(['--threads=1', '--rounds=2', f'--output={output}']) == 0
    report = json.loads(output.read_text())
    (result,) = report['results']
    assert result['losses']['maxlm'] == pytest.approx(result['losses']['torch'], rel=1e-4)
    assert result['ratio'] == result['seconds']['torch'] / result['seconds']['maxlm']
    assert 0 < result['share_of_peak'] < 1
    assert {'jax', 'torch', 'transformers'} <= report['machine'].keys()
    assert capsys.readouterr().out.splitlines()[-1] == f'worst ratio: {result["ratio"]:.2f}'


def test_sides_that_compute_something_else_are_not_compared(monkeypatch):
    monkeypatch.setattr(peers_cpu, 'TOLERANCE', 0.0)
    with pytest.raises(SystemExit, match='torch computes something else'):
        peers_cpu.measure(TINY, 1, 1, lambda: None)
