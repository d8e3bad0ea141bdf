"""Tests the rows that both sides of the comparison with nanochat train on, and that results are not computed twice."""

import json

import numpy as np
import pytest

from benchmarks import nanochat_peer, nanochat_rows, nanochat_sides
from benchmarks.nanochat_sides import Size
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from tests.conftest import ROOT

SIZE = Size(layers=1, steps=3, evaluate_every=3)
LAST = str(SIZE.steps)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Returns the words of a command whose sides have three steps, on the documentation of this repository."""
    for module in (nanochat_rows, nanochat_sides):
        monkeypatch.setattr(module, 'SEQ_LEN', 32)
        monkeypatch.setattr(module, 'VOCABULARY', 300)
    monkeypatch.setattr(nanochat_rows, 'VALIDATION_ROWS', 8)
    monkeypatch.setattr(nanochat_rows, 'HELD_OUT_EVERY', 3)
    (tmp_path / 'nanochat/nanochat').mkdir(parents=True)
    (tmp_path / 'nanochat/nanochat/gpt.py').touch()
    paths = {'nanochat': tmp_path / 'nanochat', 'text': ROOT / 'docs/tutorials', 'work': tmp_path / 'work'}
    sizes = ['--depth=1', f'--steps={SIZE.steps}', f'--evaluate-every={SIZE.steps}']
    return [*sizes, *(f'--{name}={path}' for name, path in paths.items()), f'--output={tmp_path / "results.json"}']


def test_rows_begin_at_documents_and_bytes_are_those_of_the_text(small, tmp_path):
    facts = nanochat_rows.write_rows(ROOT / 'docs/tutorials', tmp_path / 'rows.npz', tmp_path / 'tokenizer.json')
    rows, tokenizer = np.load(tmp_path / 'rows.npz'), Tokenizer.load(tmp_path / 'tokenizer.json')
    end = int(rows['end'])
    assert (rows['documents'][:, 0] == end).all()
    train, validation = nanochat_rows.split_text(ROOT / 'docs/tutorials')
    assert not set(train) & set(validation)
    for row in rows['validation']:
        # The first document of the row, of which a part may be cut.
        text = tokenizer.decode([*row[1:], end][: [*row[1:], end].index(end)]).rstrip('\ufffd')
        assert any(document.startswith(text) for document in validation)
        whole = tokenizer.decode(row[1:][row[1:] != end])
        assert '\ufffd' in whole or rows['token_bytes'][row[1:]].sum() == len(whole.encode())
    assert facts['validation']['bytes_of_rows'] == rows['token_bytes'][rows['validation'][:, 1:]].sum()


def test_a_stream_has_each_token_once_as_a_target_and_best_fit_loses_none(small, tmp_path):
    nanochat_rows.write_rows(ROOT / 'docs/tutorials', tmp_path / 'rows.npz', tmp_path / 'tokenizer.json')
    rows, tokenizer = np.load(tmp_path / 'rows.npz'), Tokenizer.load(tmp_path / 'tokenizer.json')
    train, _ = nanochat_rows.split_text(ROOT / 'docs/tutorials')
    tokens = sum(len(ids) + 1 for ids in tokenizer.encode_batch(train))
    for kind in ('stream', 'best_fit'):
        assert tokens - 32 < rows[kind][:, 1:].size <= tokens, kind
    stream, ends = rows['stream'], rows['stream'][:, 1:] == rows['end']
    assert (stream[1:, 0] == stream[:-1, -1]).all()
    assert len(rows['documents']) < len(stream)
    # Only the row that is not complete can lack ends of documents.
    assert 0 <= len(train) - (rows['best_fit'][:, 1:] == rows['end']).sum() < 32
    assert 0 <= len(train) - ends.sum() < 32


def test_too_few_rows_are_an_error(small, capsys):
    assert exit_code(nanochat_peer.main, [*small, '--steps=100000']) == EXIT_BAD_INPUT
    assert '--steps=100000: needs 400000 rows' in capsys.readouterr().err


def test_a_side_runs_only_if_its_settings_have_no_result(small, tmp_path, monkeypatch, capsys):
    ran = []

    def nanochat(*arguments):
        ran.append(arguments[-3:-1])
        return {'bits_per_byte': {LAST: 2.5}, 'torch': '0'}

    def maxlm(rows, size, changes, seed):
        ran.append(('maxlm', changes, seed))
        return {LAST: 2.6 + seed / 10}

    monkeypatch.setattr(nanochat_peer, 'run_nanochat', nanochat)
    monkeypatch.setattr(nanochat_peer, 'run_maxlm', maxlm)
    assert nanochat_peer.main([*small, '--seeds', '0', '1']) == EXIT_DONE
    assert ran == [('nanochat', 0), ('nanochat', 1), ('maxlm', (), 0), ('maxlm', (), 1)]
    assert 'maxlm: 2.6500 ± 0.0707 bits per byte' in capsys.readouterr().out
    ran.clear()
    longer = '--change=longer optimizer.wsd_decay_fraction=0.65'
    assert nanochat_peer.main([*small, longer]) == EXIT_DONE
    assert ran == [('maxlm', ('optimizer.wsd_decay_fraction=0.65',), 0)]
    ran.clear()
    # The same label with another value is another side.
    assert nanochat_peer.main([*small, longer.replace('0.65', '0.5')]) == EXIT_DONE
    assert len(ran) == 1
    settings = json.loads((tmp_path / 'results.json').read_text())['sides']['longer']['settings']
    assert settings['optimizer']['wsd_decay_fraction'] == 0.5


def test_maxlm_learns_the_rows(small, tmp_path):
    nanochat_rows.write_rows(ROOT / 'docs/tutorials', tmp_path / 'rows.npz', tmp_path / 'tokenizer.json')
    rows = np.load(tmp_path / 'rows.npz')
    curve = nanochat_peer.run_maxlm(tmp_path / 'rows.npz', SIZE, (), 0)
    targets = rows['validation'][:, 1:]
    uniform = np.log2(300) * (targets != rows['end']).sum() / rows['token_bytes'][targets].sum()
    assert 0 < curve[LAST] < uniform


def test_a_directory_without_nanochat_is_an_error(small, tmp_path, capsys):
    assert exit_code(nanochat_peer.main, [*small, f'--nanochat={tmp_path}']) == EXIT_BAD_INPUT
    assert 'contains no nanochat/gpt.py' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('name', 'side', 'bound'), [('updates', 'nanochat-2025', 5e-5), ('updates_2026', 'nanochat', 1e-3)]
)
def test_recorded_updates_are_equal(name, side, bound):
    results = json.loads((ROOT / 'benchmarks/results/nanochat_peer_cpu2.json').read_text())[name]
    assert np.abs(np.subtract(results['losses']['maxlm'], results['losses'][side])).max() < 2e-6
    assert max(results['relative_differences']['10'].values()) < bound
