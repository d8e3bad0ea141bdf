"""Tests the table of faults: its tests exist, a failing test counts, and docs/ has the measured figures."""

import ast
import json
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak import DOCS, FAULTS, RESULTS, Fault, figure, main, render, try_fault
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, exit_code
from tests.conftest import ROOT

TESTS = """
import os
from tests.faults import how_many, measured

def test_good(record_property):
    measured(record_property, 'made-up', f'{how_many(2, 200)} of {how_many(2, 200)}')

def test_bad():
    assert not os.path.exists(__file__ + '.fail')
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Replaces the table by a fault whose test fails once a file exists in the same directory."""
    path = tmp_path / 'test_made_up.py'
    path.write_text(TESTS)
    fault = Fault('made-up', 'a fault', 'a promise', (str(path),))
    monkeypatch.setattr(soak, 'FAULTS', (fault,))
    return fault


def test_every_fault_has_tests_that_exist():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.tests
        for test in fault.tests:
            path, _, function = test.partition('::')
            tree = ast.parse((ROOT / path).read_text())
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in names if function else any(name.startswith('test_') for name in names), test


def test_figures_come_from_the_tests(made_up, tmp_path):
    words = [f'--results={tmp_path}/results.json', f'--docs={tmp_path}/faults.md']
    assert main(words) == EXIT_DONE
    text = (tmp_path / 'faults.md').read_text()
    assert '| a fault | a promise |' in text
    assert '2 of 2; 2 of 2 tests passed (sample)' in text
    assert '200 of 200; 2 of 2 tests passed, ' in figure(try_fault(made_up, full=True))
    Path(f'{made_up.tests[0]}.fail').touch()
    assert main([*words, '--faults=made-up']) == EXIT_FAILED
    assert '**failed**: 1 of 2 tests passed' in (tmp_path / 'faults.md').read_text()
    (failed,) = json.loads((tmp_path / 'results.json').read_text())['made-up']['failed']
    assert failed.endswith('test_made_up.test_bad')


def test_unknown_fault(capsys):
    assert exit_code(main, ['--faults=flood']) == EXIT_BAD_INPUT
    assert "no 'flood'; one of kill, kill-save, resume" in capsys.readouterr().err


def test_table_in_docs_matches_the_results():
    results = json.loads(RESULTS.read_text())
    assert DOCS.read_text() == render(results)
    assert DOCS.read_text() != render({})
