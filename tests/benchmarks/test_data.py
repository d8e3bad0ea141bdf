"""Tests the data benchmark: all loaders give batches of the same size, and missing packages are reported."""

import json

import numpy as np

from benchmarks import data
from benchmarks.data_peers import BATCH, WINDOW, MemmapLoader


def test_a_small_run(tmp_path, monkeypatch, capsys):
    # A public loader and a package that is not installed.
    monkeypatch.setattr(data, 'PEERS', ('torch', 'nothing'))
    result = tmp_path / 'result.json'
    arguments = ['--tokens=1e6', '--shards=2', '--rounds=1', '--batches=2', f'--output={result}']
    assert data.main(arguments) == 0
    printed = capsys.readouterr().out
    assert 'nothing: not measured' in printed
    assert 'maxlm on one core' in printed
    facts = json.loads(result.read_text())
    rates = facts['tokens_per_second']
    assert any('DataLoader' in name for name in rates)
    assert {'memmap, slices stacked', 'memmap, rows filled', 'maxlm'} <= set(rates)
    assert all(rate > 0 for rate in rates.values())
    assert facts['order']['1e+12']['bytes'] < 2**20
    parts = facts['microseconds_per_window']
    assert parts['seek and read of ArrayRecord'] < parts['complete read'] + parts['order'] + parts['arrays']


def test_memmap_loader_reads_windows(tmp_path):
    np.arange(10 * WINDOW, dtype=np.uint16).tofile(tmp_path / 'tokens.bin')
    tokens, targets = MemmapLoader(tmp_path / 'tokens.bin').stacked()
    # The same seed gives the same positions.
    for filled, stacked in zip(MemmapLoader(tmp_path / 'tokens.bin').filled(), (tokens, targets), strict=True):
        np.testing.assert_array_equal(filled, stacked)
    assert tokens.shape == targets.shape == (BATCH, WINDOW)
    np.testing.assert_array_equal(tokens + 1, targets)
    assert set((tokens[:, 0] % WINDOW).tolist()) == {0}
