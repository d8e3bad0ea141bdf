"""Tests the tokenization benchmark: it runs, and its figures are for the same text."""

import json

from benchmarks import tokenize


def test_a_small_run(tmp_path, capsys):
    result = tmp_path / 'result.json'
    assert tokenize.main(['--megabytes=1', '--rounds=1', f'--output={result}']) == 0
    facts = json.loads(result.read_text())
    assert set(facts['bytes_per_second']) == {'library', 'prepare'}
    assert facts['bytes'] >= 10**6
    assert facts['ratio'] == facts['bytes_per_second']['prepare'] / facts['bytes_per_second']['library']
    assert 'of the library alone' in capsys.readouterr().out
