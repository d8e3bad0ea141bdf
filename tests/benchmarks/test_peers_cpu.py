"""Tests the comparison with PyTorch on a CPU. Each side is a process whose imports take 5 s of CPU time."""

import functools
import json

import pytest

from benchmarks import peers_cpu

TINY = {'num_layers': 1, 'dim': 32, 'num_heads': 2, 'window': 16, 'batch': 2, 'vocab_size': 65}


@pytest.fixture(autouse=True)
def two_small_sides(monkeypatch):
    monkeypatch.setattr(peers_cpu, 'PEERS', ('maxlm', 'torch'))
    monkeypatch.setattr(peers_cpu, 'SIZES', {'tiny': TINY})
    monkeypatch.setattr(peers_cpu, 'TURN_SECONDS', 0.05)
    # The rate is measured once instead of before and after each turn.
    monkeypatch.setattr(peers_cpu, 'product_rate', functools.cache(peers_cpu.product_rate))


@pytest.mark.multiprocess
@pytest.mark.nightly
@pytest.mark.timeout(600)
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


class Side:
    """Fake side with its own losses."""

    ended = []  # noqa: RUF012

    def __init__(self, peer, sizes, threads):
        self.peer, self.seconds, self.steps = peer, [], 1
        self.losses = [4.0, 3.0, 2.0 if peer == 'maxlm' else 2.001]

    def work(self, steps):
        return [0.5]

    def end(self):
        self.ended.append(self.peer)


def test_sides_with_different_losses_are_not_compared(monkeypatch):
    monkeypatch.setattr(peers_cpu, 'Side', Side)
    monkeypatch.setattr(peers_cpu, 'product_rate', lambda threads: 1.0)
    with pytest.raises(SystemExit, match='torch computes something else'):
        peers_cpu.measure(TINY, 1, 1, lambda: None)
    assert Side.ended == ['maxlm', 'torch']
    # Control: the difference is within a larger tolerance, as for another order of additions.
    monkeypatch.setattr(peers_cpu, 'TOLERANCE', 1e-3)
    assert peers_cpu.measure(TINY, 1, 1, lambda: None)['ratio'] == 1
